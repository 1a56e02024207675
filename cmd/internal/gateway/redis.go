package gateway

import (
	"context"
	"errors"
	"net"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
)

const wantRedis = "host:port, host:port,host:port, or a URL redis://, rediss://, unix://, redis+cluster:// or redis+sentinel://"

// redisTarget holds the options of a Redis client. Exactly one field is set.
type redisTarget struct {
	single   *redis.Options
	cluster  *redis.ClusterOptions
	sentinel *redis.FailoverOptions
}

func parseRedis(s string) (*redisTarget, error) {
	scheme, rest, isURL := strings.Cut(s, "://")
	if !isURL {
		return parseAddresses(strings.Split(s, ","))
	}
	var t redisTarget
	var err error
	scheme, kind, _ := strings.Cut(scheme, "+")
	plain := scheme + "://" + rest
	switch kind {
	case "":
		t.single, err = redis.ParseURL(plain)
	case "cluster":
		t.cluster, err = redis.ParseClusterURL(plain)
	case "sentinel":
		if t.sentinel, err = redis.ParseFailoverURL(plain); err == nil && t.sentinel.MasterName == "" {
			err = errors.New("no master_name")
		}
	default:
		err = errors.New("no such kind")
	}
	return &t, err
}

func parseAddresses(addrs []string) (*redisTarget, error) {
	for _, addr := range addrs {
		host, port, err := net.SplitHostPort(addr)
		if err == nil {
			_, err = strconv.ParseUint(port, 10, 16)
		}
		if err != nil || strings.Contains(host, "@") {
			return nil, errors.New("no address")
		}
	}
	if len(addrs) > 1 {
		return &redisTarget{cluster: &redis.ClusterOptions{Addrs: addrs}}, nil
	}
	return &redisTarget{single: &redis.Options{Addr: addrs[0]}}, nil
}

func (t *redisTarget) open() redis.UniversalClient {
	switch {
	case t.cluster != nil:
		return redis.NewClusterClient(t.cluster)
	case t.sentinel != nil:
		return redis.NewFailoverClient(t.sentinel)
	}
	return redis.NewClient(t.single)
}

// dialOnce lets clients tell at once that a server refuses connections: a dial is repeated for two seconds otherwise.
func (t *redisTarget) dialOnce() {
	switch {
	case t.cluster != nil:
		t.cluster.DialerRetries = 1
	case t.sentinel != nil:
		t.sentinel.DialerRetries = 1
	default:
		t.single.DialerRetries = 1
	}
}

func (c *config) newStore(client redis.UniversalClient) tokenbucket.Store {
	switch c.store {
	case "script":
		return tokenbucket.NewRedisScriptStore(client, tokenbucket.WithKeyPrefix(c.keyPrefix))
	case "lock":
		return tokenbucket.NewRedisStore(client, tokenbucket.WithKeyPrefix(c.keyPrefix))
	}
	return tokenbucket.NewMemoryStore()
}

// pulse probes Redis at every heartbeat, and keeps the result. A probe is a write where calls write, since a server that is full, or a replica,
// answers a PING as if it could serve.
type pulse struct {
	write string // key of the probe; empty for a PING

	mu    sync.Mutex
	begun time.Time     // of the probe in flight; zero if there is none
	last  time.Time     // of the last reply
	took  time.Duration // by the last probe
	err   error         // of the last probe, or of a limiter that has noticed an outage since

	first chan struct{} // closed after the first probe has succeeded or failed
	again chan struct{} // a value causes a probe at once
}

const heartbeat = time.Second

func newPulse(write string) *pulse {
	return &pulse{write: write, err: unanswered(0), first: make(chan struct{}), again: make(chan struct{}, 1)}
}

// probed returns the key that a gateway writes to probe Redis; empty if calls do not write.
func (c *config) probed() string {
	if c.store == "memory" {
		return ""
	}
	return c.keyPrefix + "probe"
}

// unanswered is the error of a Redis that has not replied for a time, or never if 0.
type unanswered time.Duration

func (s unanswered) Error() string {
	if s == 0 {
		return "no reply yet"
	}
	return "no reply for " + time.Duration(s).Round(time.Second).String()
}

// Unwrap makes the error an outage.
func (unanswered) Unwrap() error { return tokenbucket.ErrStoreTimeout }

// probe asks Redis once whether it serves what calls need.
func (p *pulse) probe(ctx context.Context, client redis.UniversalClient) error {
	if p.write == "" {
		return client.Ping(ctx).Err()
	}
	return client.Set(ctx, p.write, "", time.Second).Err()
}

// run sends probes until ctx ends.
func (p *pulse) run(ctx context.Context, client redis.UniversalClient) {
	replied := sync.OnceFunc(func() { close(p.first) })
	for timer := time.NewTimer(0); ; {
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		case <-p.again:
		}
		began := time.Now()
		p.mu.Lock()
		p.begun = began
		p.mu.Unlock()
		err := p.probe(ctx, client)
		p.mu.Lock()
		if p.begun, p.took, p.err = (time.Time{}), time.Since(began), err; err == nil {
			p.last = time.Now()
		}
		p.mu.Unlock()
		replied()
		timer.Reset(heartbeat)
	}
}

// noticed takes the outages of limiters into account, between two probes.
func (p *pulse) noticed(h tokenbucket.Health) {
	if h.Down {
		p.mu.Lock()
		p.err = h.Err
		p.mu.Unlock()
	}
	select {
	case p.again <- struct{}{}:
	default:
	}
}

// waitFirst blocks until the first probe has a result, for at most a time, and returns its error.
func (p *pulse) waitFirst(ctx context.Context, most time.Duration) error {
	timer := time.NewTimer(most)
	defer timer.Stop()
	select {
	case <-p.first:
	case <-timer.C:
	case <-ctx.Done():
	}
	_, err := p.check(most)
	return err
}

// check returns how long the last probe took, and nil or the reason why Redis cannot serve. A probe in flight may take as long as late.
func (p *pulse) check(late time.Duration) (took time.Duration, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.err != nil || p.begun.IsZero() || time.Since(p.begun) <= late:
		return p.took, p.err
	case p.last.IsZero():
		return p.took, unanswered(0)
	}
	return p.took, unanswered(time.Since(p.last))
}

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

func (c *config) newStore(client redis.UniversalClient) tokenbucket.Store {
	switch c.store {
	case "script":
		return tokenbucket.NewRedisScriptStore(client, tokenbucket.WithKeyPrefix(c.keyPrefix))
	case "lock":
		return tokenbucket.NewRedisStore(client, tokenbucket.WithKeyPrefix(c.keyPrefix))
	}
	return tokenbucket.NewMemoryStore()
}

// pulse sends a PING to Redis at every heartbeat, and keeps the result.
type pulse struct {
	mu   sync.Mutex
	last time.Time // of the last reply
	err  error     // of the last PING

	first chan struct{} // closed after the first PING has succeeded or failed
}

const heartbeat = time.Second

func newPulse() *pulse { return &pulse{err: unanswered(0), first: make(chan struct{})} }

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

// run sends PINGs until ctx ends.
func (p *pulse) run(ctx context.Context, client redis.UniversalClient) {
	replied := sync.OnceFunc(func() { close(p.first) })
	for timer := time.NewTimer(0); ; {
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-timer.C:
		}
		err := client.Ping(ctx).Err()
		p.mu.Lock()
		if p.err = err; err == nil {
			p.last = time.Now()
		}
		p.mu.Unlock()
		replied()
		timer.Reset(heartbeat)
	}
}

// waitFirst blocks until the first PING has a result, for at most three heartbeats, and returns its error.
func (p *pulse) waitFirst(ctx context.Context) error {
	timer := time.NewTimer(3 * heartbeat)
	defer timer.Stop()
	select {
	case <-p.first:
	case <-timer.C:
	case <-ctx.Done():
	}
	return p.check(3 * heartbeat)
}

// check returns nil if Redis has replied within two heartbeats and late, otherwise the reason.
func (p *pulse) check(late time.Duration) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if since := time.Since(p.last); p.err == nil && since > 2*heartbeat+late {
		return unanswered(since)
	}
	return p.err
}

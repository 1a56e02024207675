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

// redisTarget is how to reach Redis: one of these.
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

// pulse asks Redis for a sign of life, every second.
type pulse struct {
	mu   sync.Mutex
	last time.Time // of an answer
	err  error     // since then

	first chan struct{} // closed when there was an answer, or none in time
}

const heartbeat = time.Second

func newPulse() *pulse { return &pulse{err: unanswered(0), first: make(chan struct{})} }

// unanswered is for how long Redis has not answered.
type unanswered time.Duration

func (s unanswered) Error() string {
	if s == 0 {
		return "has not answered yet"
	}
	return "no answer for " + time.Duration(s).Round(time.Second).String()
}

// Unwrap tells that it is an outage.
func (unanswered) Unwrap() error { return tokenbucket.ErrStoreTimeout }

// run returns when ctx ends.
func (p *pulse) run(ctx context.Context, client redis.UniversalClient) {
	heard := sync.OnceFunc(func() { close(p.first) })
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
		heard()
		timer.Reset(heartbeat)
	}
}

// begins waits for the first answer, but not for long, and returns what became of it.
func (p *pulse) begins(ctx context.Context) error {
	timer := time.NewTimer(3 * heartbeat)
	defer timer.Stop()
	select {
	case <-p.first:
	case <-timer.C:
	case <-ctx.Done():
	}
	return p.check(3 * heartbeat)
}

// check tells whether Redis is there: an answer may be so much late.
func (p *pulse) check(late time.Duration) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if since := time.Since(p.last); p.err == nil && since > 2*heartbeat+late {
		return unanswered(since)
	}
	return p.err
}

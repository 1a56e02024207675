package slidingwindow

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// RedisClient is the part of a client that a limiter uses. *redis.Client, *redis.ClusterClient, *redis.Ring and the sentinel clients have
// it. A *redis.Ring of several shards also needs a RingOptions.HeartbeatFn that returns true for a shard that does not reply. Otherwise it
// moves keys to other shards, and New returns an error.
type RedisClient interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// Option configures a Limiter. An option with a bad value makes the constructor fail.
type Option func(*options)

type options struct {
	client   RedisClient
	given    bool // WithRedis was used, even with nil
	prefix   string
	timeout  time.Duration
	waiters  int
	policy   FailurePolicy
	version  int64
	observer *Observer
	clock    clockwork.Clock
	local    bool
	server   func(local int64) int64 // the time of scripts, by the limiter's clock; nil for the server's own clock
}

const (
	defaultPrefix  = "slidingwindow:"
	defaultTimeout = time.Second
	defaultWaiters = 1 << 17
)

// WithRedis counts in Redis, together with all processes that use the same name. A limiter is one key there, which expires by itself. It
// needs Redis 6 or later; the script uses GET, SET and TIME.
//
// While no other call of the process is in flight, a lone caller with a *redis.Client runs the script in its own goroutine, which is
// faster. If its context is cancelled meanwhile, it returns when Redis has replied, or after the timeout ([WithStoreTimeout]). The client's
// hooks are called for it only if the client has ContextTimeoutEnabled.
func WithRedis(c RedisClient) Option { return func(o *options) { o.client, o.given = c, true } }

// WithKeyPrefix sets the prefix of the key in Redis, up to 512 bytes without braces. Default "slidingwindow:".
func WithKeyPrefix(p string) Option { return func(o *options) { o.prefix = p } }

// WithStoreTimeout bounds how long a call waits for Redis, 1 ms to 1 minute, default 1 s. It is also how long it takes to notice that Redis
// hangs.
func WithStoreTimeout(d time.Duration) Option { return func(o *options) { o.timeout = d } }

// WithMaxWaiters bounds how many callers of a process may wait for Redis at a time, besides those of the batch in flight (up to 1024), and
// how many may Wait for permits. A call beyond that gets [ErrTooManyWaiters] at once. At least 1, default 131,072.
func WithMaxWaiters(n int) Option { return func(o *options) { o.waiters = n } }

// WithFailurePolicy sets how requests are decided during an outage of Redis: [FailClosed], the default, [FailOpen] or a [LocalShare].
func WithFailurePolicy(p FailurePolicy) Option { return func(o *options) { o.policy = p } }

// WithVersion gives the limit of New a version, 0 to 2^53. With 0, the default, it has none. With Redis, the limit with the newest version
// of all limits of this name and window is in force for all processes; of two with one version, the lower. Without a version a limit is in
// force in its own process, as long as no other has a version. SetLimit makes the next version.
func WithVersion(v int64) Option { return func(o *options) { o.version = v } }

// WithClock sets the clock of a limiter without Redis, and of its waits. With Redis, without [WithLocalTime], it only measures the age of
// replies: only differences count, and after it was set back the next request asks Redis. Default: the system's monotonic clock, which is
// also clockwork's real clock.
func WithClock(c clockwork.Clock) Option {
	return func(o *options) {
		if isNil(c) {
			c = noClock{}
		}
		o.clock = c
	}
}

// WithLocalTime decides by the limiter's clock instead of the Redis server's: for tests. In production the clocks of processes differ. Time
// never goes back for the state. If a process's clock is up to 2 s behind the latest time seen, time stands still for it. If it is further
// behind, its calls fail with [ErrClock] under every [FailurePolicy]. If it is ahead, the state's time moves ahead with it.
func WithLocalTime() Option { return func(o *options) { o.local = true } }

// noClock stands for a nil clock.
type noClock struct{ clockwork.Clock }

func isNil(v any) bool {
	rv := reflect.ValueOf(v)
	return !rv.IsValid() || rv.Kind() == reflect.Pointer && rv.IsNil()
}

func (n named) options(opts []Option) (*options, error) {
	o := &options{prefix: defaultPrefix, timeout: defaultTimeout, waiters: defaultWaiters}
	for _, opt := range opts {
		if opt == nil {
			return nil, n.bad("option", "nil", "no nil options")
		}
		opt(o)
	}
	_, clockless := o.clock.(noClock)
	share, shares := o.policy.share()
	switch {
	case o.given && script.Usable(o.client) != nil:
		return nil, n.bad("redis client", script.Usable(o.client), "a client")
	case script.MovesKeys(o.client):
		return nil, n.bad("redis client", script.MovingRing, script.PinnedRing)
	case len(o.prefix) > maxName || strings.ContainsAny(o.prefix, "{}"):
		return nil, n.bad("key prefix", fmt.Sprintf("%.40q", o.prefix), "at most 512 bytes without braces")
	case o.timeout < time.Millisecond || o.timeout > time.Minute:
		return nil, n.bad("timeout", o.timeout, "1ms to 1m")
	case o.waiters < 1:
		return nil, n.bad("max waiters", o.waiters, "at least 1")
	case shares && !validLimit(share):
		return nil, n.bad("share", share, limitRange)
	case shares && !o.given:
		return nil, n.bad("share", share, "WithRedis as well: a limiter of one process has nothing to share")
	case o.version < 0 || o.version > maxInteger:
		return nil, n.bad("version", o.version, "0 (unversioned) to 2^53")
	case clockless:
		return nil, n.bad("clock", "nil", "a clock")
	case o.local && !o.given:
		return nil, n.bad("local time", "without Redis", "none: it is always local then")
	}
	if o.local {
		o.server = func(local int64) int64 { return local }
	}
	return o, nil
}

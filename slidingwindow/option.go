package slidingwindow

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/redis/go-redis/v9"
)

// RedisClient is the least that is needed of a client. *redis.Client, *redis.ClusterClient, *redis.Ring and the sentinel
// clients have it.
type RedisClient interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// Away is what a limiter does while Redis is away.
type Away uint8

const (
	// Refuse fails calls with an ErrAway. Calls that the process can refuse by what it knows are still refused.
	Refuse Away = iota
	// Pass allows all calls.
	Pass
	// share admits what WithShare says.
	share
)

// String is Refuse, Pass, or Share.
func (a Away) String() string {
	switch a {
	case Refuse:
		return "Refuse"
	case Pass:
		return "Pass"
	case share:
		return "Share"
	}
	return fmt.Sprintf("Away(%d)", uint8(a))
}

// Option configures a Limiter. An option with a bad value makes the constructor fail.
type Option func(*options)

type options struct {
	mode     Mode
	client   RedisClient
	given    bool // client, even if it is nil
	prefix   string
	timeout  time.Duration
	waiters  int
	away     Away
	share    int
	hook     func(error)
	version  int64
	observer *Observer
	clock    clockwork.Clock
	local    bool
	server   func() int64 // the clock that scripts are told; nil: the server's own
}

const (
	defaultPrefix  = "slidingwindow:"
	defaultTimeout = time.Second
	defaultWaiters = 1 << 17
)

// WithMode sets how the window is counted. Default Exact.
func WithMode(m Mode) Option { return func(o *options) { o.mode = m } }

// WithRedis counts in Redis, together with all processes that use the same name. A limiter is one key there, which expires by
// itself. Redis 6 or later; the script uses GET, SET and TIME.
//
// A *redis.Client with ContextTimeoutEnabled makes a lone caller faster: while nobody else is under way, it asks Redis in its own
// goroutine. If its context is cancelled meanwhile, it returns when Redis has answered, or after the timeout ([WithTimeout]).
func WithRedis(c RedisClient) Option { return func(o *options) { o.client, o.given = c, true } }

// WithKeyPrefix sets what the key in Redis begins with, up to 512 bytes without braces. Default "slidingwindow:".
func WithKeyPrefix(p string) Option { return func(o *options) { o.prefix = p } }

// WithTimeout bounds how long a call waits for Redis, 1 ms to 1 minute, default 1 s. It is also how long it takes until a
// Redis that hangs is taken to be away.
func WithTimeout(d time.Duration) Option { return func(o *options) { o.timeout = d } }

// WithMaxWaiters bounds how many callers of a process may wait for Redis at a time, besides those of the batch under way (up to
// 1024), and how many may Wait for permits. A call beyond that gets [ErrTooManyWaiters] at once. At least 1, default 131,072.
func WithMaxWaiters(n int) Option { return func(o *options) { o.waiters = n } }

// WithAway sets what happens while Redis is away: Refuse, the default, or Pass. See [WithShare] for something in between.
//
// Away means that it cannot be reached, does not answer in time ([WithTimeout]), or says that it cannot serve now: it is loading, a
// replica, full, or its cluster is down. What somebody must repair is never taken for that, and is an error whatever is set
// here: [ErrUnusable] (NOAUTH, WRONGPASS, NOPERM, MOVED, a script that fails, a certificate, an address, a closed client),
// [ErrCorrupt] and [ErrOverflow].
func WithAway(a Away) Option { return func(o *options) { o.away = a } }

// WithShare lets each process go on by itself while Redis is away. It then admits up to n permits in any window, or the limit if that is
// lower by now. It counts exactly, and what it admitted before the outage counts, too. It refuses as long as the window is full by what
// it knows. With a share of limit / processes, the fleet keeps to the limit if no process had more than its share before.
//
// When Redis is back, it is told what was admitted: by a process that is asked within 2 s, by one that nobody asks any more within 45 s.
// In a window in which the outage begins or ends, at most limit + (processes − 1) × n are admitted. What is no outage: see WithAway.
func WithShare(n int) Option { return func(o *options) { o.away, o.share = share, n } }

// WithHook sets a function that is told of each failed round trip, and with nil when Redis answers again. It is called by one
// goroutine at a time, which waits for it.
func WithHook(f func(err error)) Option { return func(o *options) { o.hook = f } }

// WithVersion gives the limit of New a version, 0 to 2^53, default 0: none. With Redis, of all limits of this name and window the one
// with the newest version is in force for all processes; of two with one version, the lower. Without a version a limit is in force in its
// own process, as long as no other has a version. SetLimit makes the next version.
func WithVersion(v int64) Option { return func(o *options) { o.version = v } }

// WithClock sets the clock of a limiter without Redis, and of those who Wait. With Redis it is only used to tell how old an answer is,
// unless [WithLocalTime]: only differences count, and if it is set back Redis is asked anew. Default: the system's monotonic clock; so
// is clockwork's real clock.
func WithClock(c clockwork.Clock) Option {
	return func(o *options) {
		if isNil(c) {
			c = noClock{}
		}
		o.clock = c
	}
}

// WithLocalTime decides by the limiter's clock instead of the Redis server's: for tests. In production the clocks of processes
// differ. Time never goes back for the state. If a process's clock is up to 2 s behind the latest time seen, time stands still for it. If
// it is further behind, its calls fail with [ErrClock], whatever [WithAway] says. If it is ahead, the state's time goes ahead with it.
func WithLocalTime() Option { return func(o *options) { o.local = true } }

// noClock stands for a nil one.
type noClock struct{ clockwork.Clock }

func isNil(v any) bool {
	rv := reflect.ValueOf(v)
	return !rv.IsValid() || rv.Kind() == reflect.Pointer && rv.IsNil()
}

func (l *Limiter) options(opts []Option) (*options, error) {
	o := &options{prefix: defaultPrefix, timeout: defaultTimeout, waiters: defaultWaiters}
	for _, opt := range opts {
		if opt == nil {
			return nil, l.bad("option", "nil", "no nil options")
		}
		opt(o)
	}
	_, clockless := o.clock.(noClock)
	switch {
	case o.mode > Approximate:
		return nil, l.bad("mode", o.mode, "Exact or Approximate")
	case o.given && isNil(o.client):
		return nil, l.bad("redis client", "nil", "a client")
	case len(o.prefix) > maxName || strings.ContainsAny(o.prefix, "{}"):
		return nil, l.bad("key prefix", fmt.Sprintf("%.40q", o.prefix), "at most 512 bytes without braces")
	case o.timeout < time.Millisecond || o.timeout > time.Minute:
		return nil, l.bad("timeout", o.timeout, "1ms to 1m")
	case o.waiters < 1:
		return nil, l.bad("max waiters", o.waiters, "at least 1")
	case o.away > share:
		return nil, l.bad("away", uint8(o.away), "Refuse or Pass")
	case o.away == share && (o.share < 1 || int64(o.share) > maxLimit):
		return nil, l.bad("share", o.share, "1 to 2^31")
	case o.version < 0 || o.version > maxInteger:
		return nil, l.bad("version", o.version, "0 (unversioned) to 2^53")
	case clockless:
		return nil, l.bad("clock", "nil", "a clock")
	case o.local && !o.given:
		return nil, l.bad("local time", "without Redis", "none: it is always local then")
	}
	if o.local {
		o.server = l.now
	}
	return o, nil
}

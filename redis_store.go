package tokenbucket

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/logger"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redisbucket"
)

// RedisClient is the least that a store needs of a client. *redis.Client, *redis.ClusterClient, *redis.Ring, the
// sentinel clients and *redis.AutoPipeliner have it, and so has a struct that embeds one of them. A Pipeliner has it, too, but sends nothing
// before Exec: the constructor of a limiter refuses it.
//
// A client's ReadTimeout must not be shorter than the store timeout of its limiters ([WithStoreTimeout]).
//
// A *redis.Ring of several shards must keep each key on its shard, or the constructor of a limiter returns [ErrInvalidConfig]. By default
// it moves the keys of a shard that does not answer to other shards. A process that does not reach the shard would then take permits from
// a bucket of its own. RingOptions.HeartbeatFn must return true for such a shard, too: func(context.Context, *redis.Client) bool { return
// true }. Buckets on a shard that is away then have an outage, and the [FailurePolicy] decides.
type RedisClient interface {
	redis.Scripter
	Process(ctx context.Context, cmd redis.Cmder) error
}

// RedisStore keeps buckets in Redis and decides in Go, under a distributed lock: obtain, read, then commit and release
// in one script. The commit is fenced: it writes only while the lock is still held and the state still what was read, so
// a process that is paused beyond its lock's time to live overwrites nothing. That is three round trips a batch; two if
// nobody else has changed the bucket since this process did; and while others wait for the lock, a process that has more
// to ask keeps it for up to sixteen batches, one round trip each, since handing it over takes longer.
//
// RedisStore and [RedisScriptStore] share keys, and may be mixed on one bucket. Time is the Redis server's. Both need
// Redis 6 or later with scripts; the commands are EVALSHA, EVAL, TIME, GET, GETRANGE, MGET, SET, DEL, EXISTS, PTTL
// and PEXPIRE; with [LocalShare] also ZADD, ZREMRANGEBYSCORE and ZCARD. They are safe for concurrent use.
//
// Make one for each Redis and process: what is known of outages, and of how many instances there are, is the store's.
type RedisStore struct{ redisBase }

// RedisScriptStore keeps buckets in Redis and decides there, in one atomic script, one round trip a batch. It waits
// its turn while somebody holds the bucket's lock.
//
// If only one process has used a bucket for a while, that process computes beforehand what its next batch makes of the bucket, at a
// time that the server's clock has surely reached. The script then only compares and writes. The decision is the same, with less work
// for Redis.
//
// With a *redis.Client, requests to different buckets travel in one call of the script; with clients that know which
// server a key lives on (*redis.ClusterClient, *redis.Ring), in one pipeline a server. A lone caller whose context cannot be
// cancelled asks a *redis.Client in its own goroutine. Of the client's hooks, those that were added before the store was made see that; all
// do if it has ContextTimeoutEnabled. Commands pass by the queues of an *redis.AutoPipeliner: what it joins is joined already.
type RedisScriptStore struct {
	redisBase
	store *redisbucket.ScriptStore
}

// redisBase is what the two stores share. The zero value is a store that was not made by its constructor.
type redisBase struct {
	redis   *redisbucket.Store
	err     error
	decide  func(context.Context, *permit.Batch) error
	local   bool
	outages *outage.Group
	parts   *MemoryStore
	logger  *logger.Logger
}

// RedisOption configures a store. A bad value is reported by the constructor of the limiter that uses the store.
type RedisOption func(*redisOptions)

// redisOptions are what the options of a store set.
type redisOptions struct {
	redisbucket.Options
	err error // of the last option that is out of range
}

// WithLocalTime decides by the limiter's clock instead of the server's: for tests, and for servers that allow no TIME in
// scripts. All processes' clocks must then agree.
func WithLocalTime() RedisOption { return func(o *redisOptions) { o.Local = true } }

// WithKeyPrefix sets what the keys begin with. Default "tokenbucket:". Braces are not allowed.
func WithKeyPrefix(p string) RedisOption {
	return func(o *redisOptions) {
		if strings.ContainsAny(p, "{}") || len(p) > maxName {
			o.err = wanted("key prefix", fmt.Sprintf("%.40q", p), "at most 512 bytes without braces")
		}
		o.Prefix = p
	}
}

// WithLockTTL sets how long a lock outlives a holder that died, 10 ms to 1 minute, default 500 ms. All stores of a fleet
// must agree on it. It must be several round trips: a [RedisStore] whose lock expires between two of them decides nothing.
func WithLockTTL(d time.Duration) RedisOption {
	return func(o *redisOptions) {
		if d < 10*time.Millisecond || d > time.Minute {
			o.err = wanted("lock time to live", d, "10ms to 1m")
		}
		o.LockTTL = d
	}
}

// NewRedisStore returns a store that decides under a distributed lock.
func NewRedisStore(client RedisClient, opts ...RedisOption) *RedisStore {
	o := newRedisOptions(opts)
	store, err := redisbucket.NewLockStore(client, o.Options)
	return &RedisStore{newRedisBase(o, err, &store.Store, store.Decide)}
}

// NewRedisScriptStore returns a store that decides in one script.
func NewRedisScriptStore(client RedisClient, opts ...RedisOption) *RedisScriptStore {
	o := newRedisOptions(opts)
	store, err := redisbucket.NewScriptStore(client, o.Options)
	return &RedisScriptStore{newRedisBase(o, err, &store.Store, store.Decide), store}
}

func newRedisOptions(opts []RedisOption) *redisOptions {
	o := &redisOptions{Options: redisbucket.Options{
		Prefix: "tokenbucket:", LockTTL: 500 * time.Millisecond, Logger: new(logger.Logger), NewBucket: func() redisbucket.Bucket { return new(account) },
	}}
	for _, opt := range opts {
		if opt == nil {
			o.err = wanted("redis option", "nil", "no nil options")
			continue
		}
		opt(o)
	}
	return o
}

func newRedisBase(o *redisOptions, err error, store *redisbucket.Store, decide func(context.Context, *permit.Batch) error) redisBase {
	if o.err != nil {
		err = o.err
	}
	return redisBase{redis: store, err: err, decide: decide, local: o.Local, outages: new(outage.Group), parts: NewMemoryStore(), logger: o.Logger}
}

// Apply implements [Store].
func (s *redisBase) Apply(ctx context.Context, b *Batch) error {
	asked := b.native()
	switch {
	case s.decide == nil:
		return errUnmade
	case asked == nil:
		return s.redis.Exchange(ctx, b.Names, b.Decide)
	}
	return asked.answered(s.decide(ctx, asked.Batch))
}

func (s *RedisStore) describe() traits {
	if s == nil {
		return traits{err: errUnmade}
	}
	return s.traits(s)
}

func (s *RedisScriptStore) describe() traits {
	if s == nil {
		return traits{err: errUnmade}
	}
	t := s.traits(s)
	if t.err == nil {
		if t.trips = s.store.Trips(); t.trips != nil {
			t.route = s.store.Route
		}
	}
	return t
}

var errUnmade = wanted("store", "the zero value", "one made by its constructor")

func (s *redisBase) traits(self Store) traits {
	switch {
	case s.decide == nil:
		return traits{self: self, err: errUnmade}
	case s.err != nil:
		return traits{self: self, err: s.err}
	}
	t := traits{
		self: self, decides: engine.SystemClock, outages: s.outages, oneServer: s.redis.OneServer(), parts: s.parts, probe: s.redis.Probe,
		join: s.redis.Join, used: s.redis.Used, busy: s.redis.Busy, logger: s.logger,
	}
	if s.local {
		t.decides = engine.LimiterClock
	}
	return t
}

// RedisKey returns the key that holds a bucket in Redis, for an operator who looks at it. keyPrefix is that of [WithKeyPrefix]; stores use
// "tokenbucket:" by default.
func RedisKey(keyPrefix, name string) string { return keyPrefix + "{" + keyName(name) + "}" }

// account is a bucket as internal/redisbucket asks for it.
type account struct{ bucket PermitBucket }

// Parse implements [redisbucket.Bucket].
func (a *account) Parse(text string, expected *permit.Terms) error {
	return a.bucket.parse(text, expected)
}

// Decide implements [redisbucket.Bucket].
func (a *account) Decide(nowMicros int64, b *permit.Batch, out *permit.Outcome) error {
	return a.bucket.apply(nowMicros, b, out)
}

// AppendText implements [redisbucket.Bucket].
func (a *account) AppendText(dst []byte) []byte { return a.bucket.appendText(dst) }

// TTLMillis implements [redisbucket.Bucket].
func (a *account) TTLMillis(nowMicros int64, b *permit.Batch) (ttl, least int64) {
	return a.bucket.ttlMillis(nowMicros, a.bucket.renewed(b))
}

// Set implements [redisbucket.Bucket].
func (a *account) Set(o redisbucket.Bucket) { a.bucket = o.(*account).bucket }

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

// RedisClient is the part of a client that a store needs. *redis.Client, *redis.ClusterClient, *redis.Ring, the sentinel clients and
// *redis.AutoPipeliner implement it, and so does a struct that embeds one of them. A Pipeliner implements it too, but sends nothing before
// Exec: the constructor of a limiter rejects it.
//
// A client's ReadTimeout must not be shorter than the store timeout of its limiters ([WithStoreTimeout]).
//
// A *redis.Ring of several shards must keep each key on its shard, or the constructor of a limiter returns [ErrInvalidConfig]. By default
// it moves the keys of a shard that does not reply to other shards. A process that cannot reach the shard would then take permits from a
// bucket of its own. RingOptions.HeartbeatFn must return true for such a shard, too: func(context.Context, *redis.Client) bool { return
// true }. Buckets on an unavailable shard then have an outage, and the [FailurePolicy] decides.
type RedisClient interface {
	redis.Scripter
	Process(ctx context.Context, cmd redis.Cmder) error
}

// RedisStore keeps buckets in Redis and decides in Go, under a distributed lock: obtain, read, then commit and release in one script. The
// commit is fenced: it writes only if the lock is still held and the state is still the one that was read. So a process that is paused
// beyond its lock's time to live overwrites nothing.
//
// A batch takes three round trips, or two if no other process has changed the bucket since this process did. While others wait for the
// lock, a process with more requests keeps it for up to sixteen batches, one round trip each, because handing it over takes longer.
//
// While the slot of a bucket moves to another server of a cluster, its lock may be on the other server. RedisStore then decides by the script
// of [RedisScriptStore].
//
// RedisStore and [RedisScriptStore] share keys, and may be mixed on one bucket. The time is that of the Redis server. Both need Redis 6 or
// later with scripts. The commands are EVALSHA, EVAL, TIME, GET, GETRANGE, MGET, SET, DEL, EXISTS, PTTL and PEXPIRE; with [LocalShare] also
// ZADD, ZREMRANGEBYSCORE and ZCARD. Both are safe for concurrent use.
//
// Create one store for each Redis and process: outages and the number of instances are tracked by each store.
type RedisStore struct{ redisBase }

// RedisScriptStore keeps buckets in Redis and decides there, in one atomic script, one round trip a batch. It waits while a process holds
// the bucket's lock.
//
// If only one process has used a bucket for a while, that process computes in advance the state after its next batch, at a time that the
// server's clock has surely reached. The script then only compares and writes. The decision is the same, with less work for Redis.
//
// With a *redis.Client, requests to different buckets travel in one call of the script. With clients that can name the server of a key
// (*redis.ClusterClient, *redis.Ring), they travel in one pipeline a server. A lone caller whose context cannot be cancelled uses a
// *redis.Client in its own goroutine. The client's hooks that were added before the store was created run for that; all of them do if it
// has ContextTimeoutEnabled. Commands bypass the queues of an *redis.AutoPipeliner, because the engine has already combined its requests.
type RedisScriptStore struct {
	redisBase
	store *redisbucket.ScriptStore
}

// redisBase is the common part of the two stores. The zero value is a store that was not created by its constructor.
type redisBase struct {
	redis   *redisbucket.Store
	err     error
	decide  func(context.Context, *permit.Batch) error
	group   func(context.Context, *permit.Group) error
	local   bool
	outages *outage.Group
	parts   *MemoryStore
	logger  *logger.Logger
}

// RedisOption configures a store. The constructor of the limiter that uses the store returns the error of an invalid value.
type RedisOption func(*redisOptions)

// redisOptions are the values of a store's options.
type redisOptions struct {
	redisbucket.Options
	err error // of the last option that is out of range
}

// WithLocalTime makes the limiter's clock decide instead of the server's: for tests, and for servers that do not allow TIME in scripts. The
// clocks of all processes must then agree.
func WithLocalTime() RedisOption { return func(o *redisOptions) { o.Local = true } }

// WithKeyPrefix sets the prefix of all keys. Default "tokenbucket:". At most 512 bytes, without braces.
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
	return &RedisStore{newRedisBase(o, err, &store.Store, store.Decide, store.DecideGroup)}
}

// NewRedisScriptStore returns a store that decides in one script.
func NewRedisScriptStore(client RedisClient, opts ...RedisOption) *RedisScriptStore {
	o := newRedisOptions(opts)
	store, err := redisbucket.NewScriptStore(client, o.Options)
	return &RedisScriptStore{newRedisBase(o, err, &store.Store, store.Decide, store.DecideGroup), store}
}

func newRedisOptions(opts []RedisOption) *redisOptions {
	o := &redisOptions{Options: redisbucket.Options{
		Prefix: "tokenbucket:", LockTTL: 500 * time.Millisecond, Logger: new(logger.Logger), NewBucket: func() redisbucket.Bucket { return new(account) },
		DecideGroup: decideAccounts,
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

func newRedisBase(o *redisOptions, err error, store *redisbucket.Store, decide func(context.Context, *permit.Batch) error,
	group func(context.Context, *permit.Group) error,
) redisBase {
	if o.err != nil {
		err = o.err
	}
	return redisBase{redis: store, err: err, decide: decide, group: group, local: o.Local, outages: new(outage.Group), parts: NewMemoryStore(), logger: o.Logger}
}

// Apply implements [Store].
func (s *redisBase) Apply(ctx context.Context, b *Batch) error {
	asked := b.native()
	switch {
	case s.decide == nil:
		return errUnmade
	case b.joint() != nil:
		return b.together.answered(s.group(ctx, b.together.Group))
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
		t.bounded = s.store.Bounds()
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
	if !t.oneServer {
		t.slot = redisbucket.Slot
	}
	if s.local {
		t.decides = engine.LimiterClock
	}
	return t
}

// RedisKey returns the key that holds a bucket in Redis, for operators who inspect it. keyPrefix is that of [WithKeyPrefix]; the default is
// "tokenbucket:".
func RedisKey(keyPrefix, name string) string { return keyPrefix + "{" + keyName(name) + "}" }

// account implements the interface by which internal/redisbucket uses a bucket.
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

// decideAccounts decides the batches of a group on the accounts of its members.
func decideAccounts(nowMicros int64, g *permit.Group, buckets []redisbucket.Bucket) error {
	accounts := make([]*PermitBucket, len(buckets))
	for i, b := range buckets {
		accounts[i] = &b.(*account).bucket
	}
	return applyTogether(nowMicros, g, accounts)
}

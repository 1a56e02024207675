package tokenbucket

import (
	"context"
	_ "embed"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/bsm/redislock"
	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/instances"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// RedisClient is the least that a store needs of a client. *redis.Client, *redis.ClusterClient, *redis.Ring, the
// sentinel clients and *redis.AutoPipeliner have it.
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
// cancelled asks a *redis.Client in its own goroutine. The client's hooks see that only if it has ContextTimeoutEnabled.
type RedisScriptStore struct {
	redisBase
	trips redisTrips
}

// redisBase is what the two stores share.
type redisBase struct {
	client  RedisClient
	locker  *redislock.Client
	prefix  string
	local   bool
	lockTTL time.Duration
	err     error
	decider decider

	outages   *outage.Group
	oneServer bool // keeps all buckets
	parts     *MemoryStore
	instances *instances.Instances
	logger    *logger
}

// decider is either store: it decides what the engine asks of a bucket.
type decider interface {
	decide(ctx context.Context, batch *batch) error
}

// Apply implements [Store].
func (s *redisBase) Apply(ctx context.Context, b *Batch) error {
	asked := b.native()
	switch {
	case s.decider == nil:
		return errUnmade
	case asked == nil:
		return s.exchange(ctx, b)
	}
	return asked.answered(s.decider.decide(ctx, asked))
}

// RedisOption configures a store. A bad value is reported by the constructor of the limiter that uses the store.
type RedisOption func(*redisBase)

// WithLocalTime decides by the limiter's clock instead of the server's: for tests, and for servers that allow no TIME in
// scripts. All processes' clocks must then agree.
func WithLocalTime() RedisOption { return func(s *redisBase) { s.local = true } }

// WithKeyPrefix sets what the keys begin with. Default "tokenbucket:". Braces are not allowed.
func WithKeyPrefix(p string) RedisOption {
	return func(s *redisBase) {
		if strings.ContainsAny(p, "{}") || len(p) > maxName {
			s.err = wanted("key prefix", fmt.Sprintf("%.40q", p), "at most 512 bytes without braces")
		}
		s.prefix = p
	}
}

// WithLockTTL sets how long a lock outlives a holder that died, 10 ms to 1 minute, default 500 ms. All stores of a fleet
// must agree on it. It must be several round trips: a [RedisStore] whose lock expires between two of them decides nothing.
func WithLockTTL(d time.Duration) RedisOption {
	return func(s *redisBase) {
		if d < 10*time.Millisecond || d > time.Minute {
			s.err = wanted("lock time to live", d, "10ms to 1m")
		}
		s.lockTTL = d
	}
}

// NewRedisStore returns a store that decides under a distributed lock.
func NewRedisStore(client RedisClient, opts ...RedisOption) *RedisStore {
	s := &RedisStore{newRedisBase(client, opts)}
	s.decider = s
	return s
}

// NewRedisScriptStore returns a store that decides in one script.
func NewRedisScriptStore(client RedisClient, opts ...RedisOption) *RedisScriptStore {
	s := &RedisScriptStore{redisBase: newRedisBase(client, opts)}
	s.decider = s
	s.initTrips()
	return s
}

func newRedisBase(client RedisClient, opts []RedisOption) redisBase {
	s := redisBase{client: client, prefix: "tokenbucket:", lockTTL: 500 * time.Millisecond, instances: new(instances.Instances), logger: new(logger), parts: NewMemoryStore(),
		outages: new(outage.Group)}
	switch any(client).(type) {
	case *redis.ClusterClient, *redis.Ring:
	default:
		s.oneServer = true
	}
	if isNil(client) {
		s.err = wanted("redis client", "nil", "a client")
	} else {
		s.locker = redislock.New(runOnce{client})
	}
	for _, opt := range opts {
		if opt == nil {
			s.err = wanted("redis option", "nil", "no nil options")
			continue
		}
		opt(&s)
	}
	return s
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
	if s.trips.pipeline != nil && !s.local {
		t.trips, t.route = &s.trips.trips, s.route
	}
	return t
}

var errUnmade = wanted("store", "the zero value", "one made by its constructor")

func (s *redisBase) traits(self Store) traits {
	t := traits{
		self: self, err: s.err, decides: bySystemTime, outages: s.outages, oneServer: s.oneServer, parts: s.parts, probe: s.probe, join: s.join,
		logger: s.logger,
	}
	if s.err == nil && s.client == nil {
		t.err = errUnmade
	}
	if s.local {
		t.decides = byLocalTime
	}
	return t
}

// keys returns the key of a bucket that the engine knows by a name, and its lock's.
func (s *redisBase) keys(name string) (bucket, lock string) { return s.keysOf(keyName(name)) }

// keysOf returns a bucket's key and its lock's. What stands in braces is the same, so a cluster keeps them in one slot.
func (s *redisBase) keysOf(keyName string) (bucket, lock string) {
	bucket = s.prefix + "{" + keyName + "}"
	return bucket, bucket + ":lock"
}

// join makes this process one of those that use this Redis and key prefix, and are counted.
func (s *redisBase) join() *instances.Member {
	return s.instances.Join(s.client, s.prefix+"instances", func(err error) {
		s.logger.get().Warn("tokenbucket: instances cannot be counted; LocalShare goes by what it was given", "error", err)
	})
}

// probe is a write in the bucket's slot, which a replica, a full server or one without enough replicas
// refuses as it would a bucket's.
func (s *redisBase) probe(ctx context.Context, name string) error {
	bucket, _ := s.keys(name)
	cmd := redis.NewCmd(ctx, "set", bucket+":probe", "", "px", 1000)
	client := s.client
	if c, ok := client.(*redis.Client); ok {
		client = c.WithTimeout(time.Until(timeOf(ctx)))
	}
	err := client.Process(ctx, once{cmd})
	if err == nil {
		err = cmd.Err()
	}
	script.Reload(ctx, s.client, err)
	return script.ShardsError(ctx, s.client, err)
}

var (
	//go:embed lua/apply.lua
	applySource string
	//go:embed lua/read.lua
	readSource string
	//go:embed lua/commit.lua
	commitSource string
	//go:embed lua/clip.lua
	clipSource string
	//go:embed lua/exchange.lua
	exchangeSource string

	applyScript    = script.New(applySource)
	readScript     = script.New(readSource)
	commitScript   = script.New(commitSource)
	clipScript     = script.New(clipSource)
	exchangeScript = script.New(exchangeSource)
)

// once is a command that the client must not send twice. With its default options go-redis sends a script whose
// reply was lost up to four times: it would take the permits four times.
type once struct{ *redis.Cmd }

// NoRetry implements redis.Cmder.
func (once) NoRetry() bool { return true }

// Clone implements redis.Cmder: a copy must not be sent twice either.
func (c once) Clone() redis.Cmder { return once{c.Cmd.Clone().(*redis.Cmd)} }

// runOnce lets redislock run its scripts once, too.
type runOnce struct{ RedisClient }

func (r runOnce) do(ctx context.Context, command, source string, keys []string, args []any) *redis.Cmd {
	all := make([]any, 0, 3+len(keys)+len(args))
	all = append(all, command, source, len(keys))
	for _, key := range keys {
		all = append(all, key)
	}
	cmd := redis.NewCmd(ctx, append(all, args...)...)
	cmd.SetFirstKeyPos(3)
	if err := r.Process(ctx, once{cmd}); err != nil && cmd.Err() == nil {
		cmd.SetErr(err)
	}
	script.Reload(ctx, r.RedisClient, cmd.Err())
	return cmd
}

// Eval implements redis.Scripter.
func (r runOnce) Eval(ctx context.Context, script string, keys []string, args ...any) *redis.Cmd {
	return r.do(ctx, "eval", script, keys, args)
}

// EvalSha implements redis.Scripter.
func (r runOnce) EvalSha(ctx context.Context, sha string, keys []string, args ...any) *redis.Cmd {
	return r.do(ctx, "evalsha", sha, keys, args)
}

// run runs a script once; its keys are the first of the arguments.
func (s *redisBase) run(ctx context.Context, sc *script.Script, keys int, args ...string) ([]string, error) {
	return runBy(ctx, s.client, sc, keys, args)
}

func runBy(ctx context.Context, client RedisClient, sc *script.Script, keys int, args []string) ([]string, error) {
	reply, err := sc.Run(ctx, client, keys, args...)
	if err != nil && strings.Contains(err.Error(), "WRONGTYPE") {
		return nil, wrongType(args[0])
	}
	return reply, err
}

// corruptKey is an ErrCorruptState of what is stored under a key.
func corruptKey(key string, err error) error { return corrupt(fmt.Sprintf("key %q", key), err) }

func wrongType(key string) error {
	return fmt.Errorf("%w: key %q holds no string", ErrCorruptState, key)
}

// clockArg is the time for a script to decide by, "" for the server's.
func (s *redisBase) clockArg(batch *batch) string {
	if !s.local {
		return ""
	}
	return strconv.FormatInt(batch.LocalMicros(), 10)
}

// deadlineArg is a deadline by the server's clock: perhaps early, but never too late.
func (s *redisBase) deadlineArg(deadline time.Time, server *clock.Remote) string {
	if deadline.IsZero() || s.local || !server.Known() {
		return ""
	}
	return strconv.FormatInt(server.Earliest(clock.Of(deadline)), 10)
}

func timeOf(ctx context.Context) time.Time {
	deadline, _ := ctx.Deadline()
	return deadline
}

func (s *redisBase) tooLate(batch *batch) error {
	return fmt.Errorf("%w: bucket %q: the script ran too late and took nothing", ErrStoreTimeout, label(batch.Name))
}

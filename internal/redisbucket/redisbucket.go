// Package redisbucket keeps the states of buckets in Redis and decides batches on them.
//
// A batch must be decided in one atomic step, although a reply may be lost, a lock may expire under its holder, and the client may send a
// command again. LockStore decides in this process under a distributed lock, with a fenced commit. ScriptStore decides in one script. Both
// share keys and may be mixed on one bucket. ScriptStore also carries the batches of many buckets in one round trip.
//
// A process that uses a bucket alone knows its state. It computes beforehand what the next batch makes of that state, and the script only
// compares and writes. This knowledge is a Session; it travels with the bucket's batches.
//
// The package imports neither the arithmetic nor the engine. It reaches the arithmetic by the interface Bucket.
package redisbucket

import (
	"context"
	_ "embed"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/bsm/redislock"
	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/instances"
	"github.com/go-tokenbucket/tokenbucket/internal/logger"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// Client is the part of a go-redis client that a store needs.
type Client interface {
	redis.Scripter
	Process(ctx context.Context, cmd redis.Cmder) error
}

// Bucket is the state of one bucket, with the arithmetic that decides batches on it. It is not safe for concurrent use.
type Bucket interface {
	// Parse reads a stored state; "" is a bucket that does not exist. A configuration that equals the expected one is not parsed again;
	// expected may be nil. The error names the corrupt field and leaves the bucket unchanged.
	Parse(text string, expected *permit.Terms) error
	// Decide decides a batch at a time of the store's clock. The result equals that of lua/bucket.lua to the last bit.
	Decide(nowMicros int64, b *permit.Batch, out *permit.Outcome) error
	// AppendText appends the state in its stored form.
	AppendText(dst []byte) []byte
	// TTLMillis returns the time to live of a state that a batch writes, in milliseconds, and the part of it that the state needs at least.
	TTLMillis(nowMicros int64, b *permit.Batch) (ttl, least int64)
	// Set copies another bucket.
	Set(o Bucket)
}

// Options configure a store. All fields are required.
type Options struct {
	// Prefix begins every key.
	Prefix string
	// Local makes the limiter's clock decide instead of the server's.
	Local bool
	// LockTTL is the time to live of a lock: how long it outlives a holder that died.
	LockTTL time.Duration
	// Logger receives the warnings of the store.
	Logger *logger.Logger
	// NewBucket returns a bucket that does not exist yet.
	NewBucket func() Bucket
	// DecideGroup decides the batches of a group on the buckets of its members, at a time of the store's clock. The result equals that of
	// lua/group.lua to the last bit.
	DecideGroup func(nowMicros int64, g *permit.Group, buckets []Bucket) error
}

// Store has what LockStore and ScriptStore share. It is safe for concurrent use.
type Store struct {
	client  Client
	bounded Client // the same client; if bounds is set, its calls return at their context's deadline
	bounds  bool
	locker  *redislock.Client
	prefix  string
	local   bool
	lockTTL time.Duration

	oneServer   bool          // one server keeps all buckets
	readTimeout time.Duration // of the client; 0 if it is unknown or unlimited
	warned      atomic.Bool   // a warning about readTimeout was logged
	reviewed    atomic.Bool   // the server was asked for its eviction policy
	instances   instances.Instances
	logger      *logger.Logger
	newBucket   func() Bucket
	decideGroup func(int64, *permit.Group, []Bucket) error
	scratches   sync.Pool // of *scratch
}

// init sets the store up. The error is non-nil if the client cannot work.
func (s *Store) init(client Client, o Options) error {
	s.client, s.prefix, s.local, s.lockTTL, s.logger = client, o.Prefix, o.Local, o.LockTTL, o.Logger
	s.newBucket, s.decideGroup = o.NewBucket, o.DecideGroup
	s.scratches.New = func() any { return s.newScratch() }
	if err := s.examine(); err != nil {
		return err
	}
	s.locker = redislock.New(runOnce{s.client})
	s.bounded = s.client
	if bounded := script.Bounded(s.client); bounded != nil {
		s.bounded, s.bounds = bounded, true
	}
	return nil
}

func (s *Store) newScratch() *scratch { return &scratch{left: s.newBucket()} }

// OneServer reports whether one server keeps all buckets, so that an outage is one of all of them.
func (s *Store) OneServer() bool { return s.oneServer }

// Keys returns the Redis keys of a bucket and of its lock. They share the first part in braces, so a cluster keeps both in one slot.
func (s *Store) Keys(key string) (bucket, lock string) {
	bucket = s.prefix + "{" + key + "}"
	if slot, name, ok := cutSlot(key); ok {
		bucket = s.prefix + "{" + slot + "}{" + name + "}"
	}
	return bucket, bucket + ":lock"
}

// slotMark and nameMark begin the slot and the rest of a key with a slot. No encoded name has a % like theirs.
const slotMark, nameMark = "%slot:", "%in:"

// SlotKey returns the key of a bucket in a slot.
func SlotKey(slot, key string) string { return slotMark + slot + nameMark + key }

func cutSlot(key string) (slot, name string, ok bool) {
	if !strings.HasPrefix(key, slotMark) {
		return "", key, false
	}
	return strings.Cut(key[len(slotMark):], nameMark)
}

// Slot returns the part of a bucket's keys in braces, which decides on which server of a cluster they are.
func Slot(key string) string {
	if slot, _, ok := cutSlot(key); ok {
		return slot
	}
	return key
}

// Bounds reports whether calls return at their context's deadline.
func (s *Store) Bounds() bool { return s.bounds }

// Join counts this process among the instances that use this Redis with this key prefix.
func (s *Store) Join() *instances.Member {
	return s.instances.Join(s.client, s.prefix+"instances", func(err error) {
		defer s.logger.Recovered()
		s.logger.Get().Warn("tokenbucket: instances cannot be counted, so LocalShare uses the number that it was given (--fail share:N); "+
			"the user needs +zadd +zremrangebyscore +zcard +pexpire +time", "error", err)
	})
}

var (
	//go:embed lua/bucket.lua
	bucketSource string
	//go:embed lua/apply.lua
	applySource string
	//go:embed lua/group.lua
	groupSource string
	//go:embed lua/group_commit.lua
	groupCommitSource string
	//go:embed lua/read.lua
	readSource string
	//go:embed lua/commit.lua
	commitSource string
	//go:embed lua/clip.lua
	clipSource string
	//go:embed lua/exchange.lua
	exchangeSource string

	ApplyScript       = script.New(bucketSource + applySource)
	GroupScript       = script.New(bucketSource + groupSource)
	ReadScript        = script.New(readSource)
	CommitScript      = script.New(commitSource)
	GroupCommitScript = script.New(groupCommitSource)
	ClipScript        = script.New(clipSource)
	ExchangeScript    = script.New(exchangeSource)
)

// runOnce is a client on which redislock runs each script once. See script.Once.
type runOnce struct{ Client }

func (r runOnce) do(ctx context.Context, command, source string, keys []string, args []any) *redis.Cmd {
	all := make([]any, 0, 3+len(keys)+len(args))
	all = append(all, command, source, len(keys))
	for _, key := range keys {
		all = append(all, key)
	}
	cmd := redis.NewCmd(ctx, append(all, args...)...)
	cmd.SetFirstKeyPos(3)
	if err := r.Process(ctx, script.Once{Cmd: cmd}); err != nil && cmd.Err() == nil {
		cmd.SetErr(err)
	}
	script.Reload(ctx, r.Client, cmd.Err())
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

// run runs a script once. The keys are the first arguments. If they are apart, it returns at once.
func (s *Store) run(ctx context.Context, sc *script.Script, keys int, args ...string) ([]string, error) {
	reply, err := runBy(ctx, s.client, sc, keys, args)
	return reply, s.poolError(args[0], err)
}

func runBy(ctx context.Context, client Client, sc *script.Script, keys int, args []string) ([]string, error) {
	reply, err := sc.RunTogether(ctx, client, keys, args...)
	if err != nil && strings.Contains(err.Error(), "WRONGTYPE") {
		return nil, wrongType(args[0])
	}
	return reply, err
}

// corruptKey returns an ErrCorruptState that names the key.
func corruptKey(key string, err error) error {
	return fmt.Errorf("%w: key %q: %w", permit.ErrCorruptState, key, err)
}

func wrongType(key string) error {
	return fmt.Errorf("%w: key %q holds no string", permit.ErrCorruptState, key)
}

// clockArg returns the time that a script decides by: "" for the server's clock.
func (s *Store) clockArg(batch *permit.Batch) string {
	if !s.local {
		return ""
	}
	return strconv.FormatInt(batch.LocalMicros(), 10)
}

// deadlineArg returns a deadline by the server's clock, early by the uncertainty of the estimate; "" if the clock is not known yet.
func (s *Store) deadlineArg(deadline time.Time, server *clock.Remote) string {
	if deadline.IsZero() || s.local || !server.Known() {
		return ""
	}
	return strconv.FormatInt(server.Earliest(clock.Of(deadline)), 10)
}

func timeOf(ctx context.Context) time.Time {
	deadline, _ := ctx.Deadline()
	return deadline
}

func (s *Store) tooLate(batch *permit.Batch) error {
	return fmt.Errorf("%w: bucket %q: the script ran too late and took nothing", permit.ErrStoreTimeout, batch.Name)
}

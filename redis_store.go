package tokenbucket

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/bsm/redislock"
	"github.com/redis/go-redis/v9"
)

// RedisClient is the least that a store needs of a client. *redis.Client, *redis.ClusterClient, *redis.Ring, the
// sentinel clients and *redis.AutoPipeliner have it.
type RedisClient interface {
	redis.Scripter
	Process(ctx context.Context, cmd redis.Cmder) error
}

// RedisStore keeps buckets in Redis and decides in Go, under a distributed lock: obtain, read, then commit and release
// in one script, three round trips a batch. The commit is fenced: it writes only while the lock is still held and the
// state still what was read, so a process that is paused beyond its lock's time to live overwrites nothing.
//
// RedisStore and RedisScriptStore share keys, and may be mixed on one bucket. Time is the Redis server's. Both need
// Redis 6 or later with scripts; the commands are EVALSHA, EVAL, TIME, GET, SET, DEL, PTTL and PEXPIRE. They are safe
// for concurrent use.
type RedisStore struct{ redisBase }

// RedisScriptStore keeps buckets in Redis and decides there, in one atomic script, one round trip a batch. It waits
// its turn while somebody holds the bucket's lock.
type RedisScriptStore struct{ redisBase }

// redisBase is what the two stores share.
type redisBase struct {
	client  RedisClient
	locker  *redislock.Client
	prefix  string
	local   bool
	lockTTL time.Duration
	err     error
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
			s.err = fmt.Errorf("%w: key prefix %.40q: want at most 512 bytes without braces", ErrInvalidConfig, p)
		}
		s.prefix = p
	}
}

// WithLockTTL sets how long a lock outlives a holder that died, 10 ms to 1 minute, default 500 ms. All stores of a fleet
// must agree on it.
func WithLockTTL(d time.Duration) RedisOption {
	return func(s *redisBase) {
		if d < 10*time.Millisecond || d > time.Minute {
			s.err = fmt.Errorf("%w: lock time to live %v: want 10ms to 1m", ErrInvalidConfig, d)
		}
		s.lockTTL = d
	}
}

// NewRedisStore returns a store that decides under a distributed lock.
func NewRedisStore(client RedisClient, opts ...RedisOption) *RedisStore {
	return &RedisStore{newRedisBase(client, opts)}
}

// NewRedisScriptStore returns a store that decides in one script.
func NewRedisScriptStore(client RedisClient, opts ...RedisOption) *RedisScriptStore {
	return &RedisScriptStore{newRedisBase(client, opts)}
}

func newRedisBase(client RedisClient, opts []RedisOption) redisBase {
	s := redisBase{client: client, prefix: "tokenbucket:", lockTTL: 500 * time.Millisecond}
	if isNil(client) {
		s.err = fmt.Errorf("%w: redis client is nil", ErrInvalidConfig)
	} else {
		s.locker = redislock.New(runOnce{client})
	}
	for _, opt := range opts {
		if opt == nil {
			s.err = fmt.Errorf("%w: redis option is nil", ErrInvalidConfig)
			continue
		}
		opt(&s)
	}
	return s
}

func (s *RedisStore) check() error       { return s.checkBase(s == nil) }
func (s *RedisScriptStore) check() error { return s.checkBase(s == nil) }

func (s *redisBase) checkBase(isNil bool) error {
	switch {
	case isNil:
		return fmt.Errorf("%w: store is nil", ErrInvalidConfig)
	case s.err == nil && s.client == nil:
		return fmt.Errorf("%w: store was not made by its constructor", ErrInvalidConfig)
	}
	return s.err
}

// keys returns the bucket's key and its lock's. What stands in braces is the same, so a cluster keeps them in one slot.
func (s *redisBase) keys(name string) (bucket, lock string) {
	bucket = s.prefix + "{" + encodeName(name) + "}"
	return bucket, bucket + ":lock"
}

// encodeName escapes what could leave the braces or disturb a person's terminal, and the escape itself, as in URLs.
func encodeName(name string) string {
	const hex = "0123456789ABCDEF"
	plain := func(c byte) bool { return c > ' ' && c != '%' && c != '{' && c != '}' && c != 0x7f }
	var b strings.Builder
	for i := range len(name) {
		if c := name[i]; plain(c) {
			b.WriteByte(c)
		} else {
			b.WriteByte('%')
			b.WriteByte(hex[c>>4])
			b.WriteByte(hex[c&15])
		}
	}
	return b.String()
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

	applyScript  = newScript(applySource)
	readScript   = newScript(readSource)
	commitScript = newScript(commitSource)
	clipScript   = newScript(clipSource)
)

type script struct{ source, sha string }

func newScript(source string) script { return script{source, redis.NewScript(source).Hash()} }

// once is a command that the client must not send twice. With its default options go-redis sends a script whose
// reply was lost up to four times: it would take the permits four times.
type once struct{ *redis.Cmd }

// NoRetry implements redis.Cmder.
func (once) NoRetry() bool { return true }

// Clone implements redis.Cmder: a copy must not be sent twice either.
func (c once) Clone() redis.Cmder { return once{c.Cmd.Clone().(*redis.Cmd)} }

// runOnce lets redislock run its scripts once, too.
type runOnce struct{ RedisClient }

func (r runOnce) do(ctx context.Context, command, script string, keys []string, args []any) *redis.Cmd {
	all := make([]any, 0, 3+len(keys)+len(args))
	all = append(all, command, script, len(keys))
	for _, key := range keys {
		all = append(all, key)
	}
	cmd := redis.NewCmd(ctx, append(all, args...)...)
	cmd.SetFirstKeyPos(3)
	if err := r.Process(ctx, once{cmd}); err != nil && cmd.Err() == nil {
		cmd.SetErr(err)
	}
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

// run runs a script once. Only what Redis says it has not executed is sent again, until the context's deadline.
func (s *redisBase) run(ctx context.Context, sc script, keys []string, args ...any) (any, error) {
	r := runOnce{s.client}
	for pause := newPause(); ; {
		reply, err := r.EvalSha(ctx, sc.sha, keys, args...).Result()
		if err != nil && redis.HasErrorPrefix(err, "NOSCRIPT") {
			reply, err = r.Eval(ctx, sc.source, keys, args...).Result()
		}
		if err == nil {
			return reply, nil
		}
		if strings.Contains(err.Error(), "WRONGTYPE") {
			return nil, fmt.Errorf("%w: key %q holds no string: %w", ErrCorruptState, keys[0], err)
		}
		if !notExecuted(err) || !pause.wait(ctx) {
			return nil, err
		}
	}
}

// notExecuted tells whether Redis refused a command without running any of it.
func notExecuted(err error) bool {
	for _, prefix := range []string{"LOADING", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "NOREPLICAS"} {
		if redis.HasErrorPrefix(err, prefix) {
			return true
		}
	}
	return false
}

// pause grows from 0.2 ms to 10 ms, each with jitter, so that a fleet does not knock in step.
type pause time.Duration

func newPause() *pause {
	p := pause(200 * time.Microsecond)
	return &p
}

// NextBackoff implements redislock.RetryStrategy.
func (p *pause) NextBackoff() time.Duration {
	d := time.Duration(*p)
	*p = pause(min(2*d, 10*time.Millisecond))
	return d/2 + rand.N(d)
}

// wait reports false if the context ends first.
func (p *pause) wait(ctx context.Context) bool {
	timer := time.NewTimer(p.NextBackoff())
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// clockArg is the time for a script to decide by.
func (s *redisBase) clockArg(batch *Batch) string {
	if !s.local {
		return ""
	}
	return strconv.FormatInt(batch.LocalMicros(), 10)
}

// deadlineArg is the context's deadline by the server's clock, which was at server when read at local. It is early by
// what that answer took to arrive, so never too late.
func (s *redisBase) deadlineArg(ctx context.Context, server int64, local time.Time) string {
	deadline, ok := ctx.Deadline()
	if !ok || s.local || local.IsZero() {
		return ""
	}
	return strconv.FormatInt(server+deadline.Sub(local).Microseconds(), 10)
}

// replies of lua/apply.lua
const (
	replyDecided = iota
	replyLate
	replyLocked
	replyCorrupt
)

// Apply implements Store.
func (s *RedisScriptStore) Apply(ctx context.Context, batch *Batch) (Outcome, error) {
	bucket, lock := s.keys(batch.Name)
	keys := []string{bucket, lock}
	args := s.encode(batch)
	server, local := batch.ServerMicros, batch.ServerRead
	late, locked := false, false
	for pause := newPause(); ; {
		args[0], args[1] = s.clockArg(batch), s.deadlineArg(ctx, server, local)
		reply, err := s.run(ctx, applyScript, keys, args...)
		if err != nil && locked && ctx.Err() != nil {
			return Outcome{}, fmt.Errorf("%w: key %q", ErrLockNotObtained, lock)
		}
		if err != nil {
			return Outcome{}, err
		}
		status, now, rest, err := applyReply(reply)
		if err != nil {
			return Outcome{}, fmt.Errorf("key %q: %w", bucket, err)
		}
		switch status {
		case replyDecided:
			return replay(batch, bucket, now, rest[0].(string), rest[1].(string))
		case replyLate:
			if late || ctx.Err() != nil { // once more with the right time: the server's clock may have stepped
				return Outcome{}, fmt.Errorf("%w: bucket %q: the script ran too late and took nothing", ErrStoreTimeout, batch.Name)
			}
			late, server, local = true, now, time.Now()
		case replyLocked:
			if locked = true; !pause.wait(ctx) {
				return Outcome{}, fmt.Errorf("%w: key %q is held for %v ms more", ErrLockNotObtained, lock, rest[0])
			}
		case replyCorrupt:
			err := new(PermitBucket).UnmarshalText([]byte(rest[0].(string)))
			if err == nil {
				err = fmt.Errorf("%w: %q…", ErrCorruptState, rest[0])
			}
			return Outcome{}, fmt.Errorf("key %q: %w", bucket, err)
		}
	}
}

// applyReply takes a reply of lua/apply.lua apart.
func applyReply(reply any) (status, now int64, rest []any, err error) {
	r, ok := reply.([]any)
	if ok && len(r) >= 2 {
		status, ok = r[0].(int64)
		text, isText := r[1].(string)
		now, err = strconv.ParseInt(text, 10, 64)
		ok = ok && isText && err == nil
	}
	want := map[int64]int{replyDecided: 4, replyLate: 2, replyLocked: 3, replyCorrupt: 3}[status]
	if !ok || len(r) != want {
		return 0, 0, nil, fmt.Errorf("tokenbucket: unexpected reply %v", reply)
	}
	return status, now, r[2:], nil
}

// replay computes the script's answers from the state it started with: both languages compute the same, so a reply
// needs no grants in it, however large the batch. That they do is checked with every reply.
func replay(batch *Batch, key string, now int64, old, new string) (Outcome, error) {
	var b PermitBucket
	if err := b.UnmarshalText([]byte(old)); err != nil {
		return Outcome{}, fmt.Errorf("key %q: %w", key, err)
	}
	out, err := b.Apply(now, batch)
	if err != nil {
		return Outcome{}, err
	}
	var text []byte
	if out.Changed {
		text, _ = b.MarshalText()
	}
	if string(text) != new {
		return Outcome{}, fmt.Errorf("tokenbucket: key %q: Redis decided %q, but this process computes %q from %q; please report this", key, new, text, old)
	}
	return out, nil
}

// encode writes a batch as arguments of lua/apply.lua; the first two are left to the caller. Equal requests in a row
// travel as a count.
func (s *redisBase) encode(b *Batch) []any {
	own := string(b.Config.appendText(nil))
	known := ""
	if b.Known.Version > b.Config.Version {
		known = string(b.Known.appendText(nil))
	}
	args := make([]any, 0, 7+4*len(b.Requests))
	args = append(args, "", "", s.lockTTL.Milliseconds(), b.Epoch, own, known, exact(b.Initial))
	for i := 0; i < len(b.Requests); i++ {
		r := &b.Requests[i]
		switch r.Op {
		case OpTake:
			n := 1
			for ; i+1 < len(b.Requests) && b.Requests[i+1].sameTake(r); i++ {
				n++
			}
			args = append(args, "T", n, r.Permits, r.MaxWaitMicros)
		case OpGiveBack:
			g := &r.Back
			args = append(args, "G", g.Epoch, g.Tag, g.Tail, g.Version, g.ID, exact(g.to.Stored), g.to.Next, exact(g.to.Carry),
				g.end, exact(g.spent), exact(g.level), g.granted)
		case OpSetRate:
			args = append(args, "S", exact(r.Rate))
		case OpReset:
			args = append(args, "R")
		}
	}
	return args
}

func (r *Request) sameTake(o *Request) bool {
	return r.Op == o.Op && r.Permits == o.Permits && r.MaxWaitMicros == o.MaxWaitMicros
}

// exact is a float64 in a form that both languages read back unchanged.
func exact(f float64) string { return strconv.FormatFloat(f, 'g', 17, 64) }

// Apply implements Store.
func (s *RedisStore) Apply(ctx context.Context, batch *Batch) (Outcome, error) {
	bucket, lock := s.keys(batch.Name)
	for pause := newPause(); ; {
		token, err := s.obtain(ctx, lock)
		if err != nil {
			return Outcome{}, err
		}
		out, done, err := s.decide(ctx, batch, bucket, lock, token)
		if err != nil {
			s.release(lock, token)
			return Outcome{}, err
		}
		if done {
			return out, nil
		}
		if !pause.wait(ctx) {
			return Outcome{}, fmt.Errorf("%w: key %q was lost again and again; is its time to live of %v too short?",
				ErrLockNotObtained, lock, s.lockTTL)
		}
	}
}

// obtain takes the lock, or gives up when the context ends.
func (s *RedisStore) obtain(ctx context.Context, lock string) (token string, err error) {
	for {
		token = strconv.FormatUint(rand.Uint64(), 36) + strconv.FormatUint(rand.Uint64(), 36)
		attempt, cancel := context.WithTimeout(ctx, s.lockTTL)
		_, err = s.locker.Obtain(attempt, lock, s.lockTTL, &redislock.Options{Token: token, RetryStrategy: newPause()})
		waited := attempt.Err() != nil
		cancel()
		switch {
		case err == nil:
			return token, nil
		case !waited && notExecuted(err):
			if !newPause().wait(ctx) {
				return "", err
			}
			continue
		case !waited || !errors.Is(err, context.DeadlineExceeded):
			s.release(lock, token) // the answer may be lost, but not the lock taken
			return "", err
		}
		s.release(lock, token)
		if ctx.Err() != nil {
			return "", fmt.Errorf("%w: key %q", ErrLockNotObtained, lock)
		}
		// Whoever held it for longer than its time to live has died while the clock was set back, or set no expiry.
		if _, err := s.run(ctx, clipScript, []string{lock}, s.lockTTL.Milliseconds()); err != nil {
			return "", err
		}
	}
}

// release removes a lock that may be ours, with a context of its own. Nobody waits for it.
func (s *RedisStore) release(lock, token string) {
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), s.lockTTL)
		defer cancel()
		// The bucket's key is only named to be in the same slot; without a new state nothing is read or written.
		_, _ = s.run(ctx, commitScript, []string{strings.TrimSuffix(lock, ":lock"), lock}, token, "", "", "", "")
	}()
}

// decide reads, applies and commits under the lock. It reports false if the lock was lost: nothing happened.
func (s *RedisStore) decide(ctx context.Context, batch *Batch, bucket, lock, token string) (out Outcome, done bool, err error) {
	keys := []string{bucket, lock}
	reply, err := s.run(ctx, readScript, keys, s.clockArg(batch), token)
	if err != nil {
		return out, false, err
	}
	read := time.Now()
	r, ok := reply.([]any)
	if !ok || len(r) != 3 {
		return out, false, fmt.Errorf("tokenbucket: key %q: unexpected reply %v", bucket, reply)
	}
	if r[0] != int64(1) {
		return out, false, nil
	}
	now, err := strconv.ParseInt(r[1].(string), 10, 64)
	if err != nil {
		return out, false, err
	}
	old := r[2].(string)
	var b PermitBucket
	if err := b.UnmarshalText([]byte(old)); err != nil {
		return out, false, fmt.Errorf("key %q: %w", bucket, err)
	}
	if out, err = b.Apply(now, batch); err != nil {
		return out, false, err
	}
	var text []byte
	if out.Changed {
		text, _ = b.MarshalText()
	}
	reply, err = s.run(ctx, commitScript, keys, token, s.deadlineArg(ctx, now, read), old, text, b.TTLMillis(out.NowMicros))
	if err != nil {
		return out, false, err
	}
	if reply == int64(2) {
		return out, false, fmt.Errorf("%w: bucket %q: the commit ran too late and took nothing", ErrStoreTimeout, batch.Name)
	}
	return out, reply == int64(1), nil
}

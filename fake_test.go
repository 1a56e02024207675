package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/instances"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redisbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// termsOf are the terms of a configuration.
func termsOf(c config) *permit.Terms { return &newSetting(c).terms }

// decision is an outcome with all of the bucket.
type decision struct {
	permit.Outcome
	Bucket PermitBucket
}

// apply has a store decide a batch.
func apply(ctx context.Context, s Store, b *permit.Batch) (decision, error) {
	b.Read, b.Key = true, keyName(b.Name)
	err := askStore(ctx, s, b)
	d := decision{Outcome: b.Outcome}
	if b.Outcome.State != nil {
		d.Bucket = *b.Outcome.State.(*PermitBucket)
	}
	return d, err
}

// patient is for limiters on a real server: a busy machine is no outage.
var patient = WithStoreTimeout(time.Minute)

// Stores and clients that fail, hang or are slow on demand, for tests that wait in a bubble of testing/synctest.

// bubble runs a test in a bubble, and leaves what it has begun the time to end.
func bubble(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		defer time.Sleep(time.Minute) // probes are kept for seconds
		test(t)
	})
}

// ailing is a store that fails or hangs on demand. Batches without requests probe it.
type ailing struct {
	store MemoryStore
	fails atomic.Bool // requests
	ill   atomic.Bool // whatever is asked
	hangs atomic.Bool
	calls atomic.Int64
}

func (s *ailing) Apply(ctx context.Context, b *Batch) error {
	s.calls.Add(1)
	if s.hangs.Load() {
		<-ctx.Done()
		<-ctx.Done()
		return fmt.Errorf("%w: hung", ErrStoreTimeout)
	}
	if s.fails.Load() && len(b.asked.Requests) > 0 || s.ill.Load() {
		return fmt.Errorf("%w: failed", ErrStoreTimeout)
	}
	return s.store.Apply(ctx, b)
}

// sick is an ailing store with a probe of its own.
type sick struct {
	ailing
	stuck chan struct{} // probes block until it is closed; nil if they do not block
	trip  atomic.Int64  // how long it takes to answer whatever is asked
}

func (s *sick) Apply(ctx context.Context, b *Batch) error {
	if err := s.travel(ctx); err != nil {
		return err
	}
	return s.ailing.Apply(ctx, b)
}

func (s *sick) travel(ctx context.Context) error {
	trip := time.Duration(s.trip.Load())
	if trip == 0 {
		return nil
	}
	select {
	case <-time.After(trip):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *sick) describe() traits { return traits{self: s, probe: s.probe} }

func (s *sick) probe(ctx context.Context, _ string) error {
	if s.stuck != nil {
		<-s.stuck
	}
	if err := s.travel(ctx); err != nil {
		return err
	}
	if s.ill.Load() {
		return fmt.Errorf("%w: no", ErrStoreUnavailable)
	}
	return nil
}

// away begins or ends an outage that a limiter notices.
func (s *sick) away(t *testing.T, l *RateLimiter, is bool) {
	s.ill.Store(is)
	s.fails.Store(is)
	if is {
		_, _ = l.Reserve(background, 1)
	}
	healthy(t, l, !is)
}

// oneServer is a sick store whose buckets are away together, as those of one Redis are.
type oneServer struct {
	sick
	outages outage.Group
	parts   MemoryStore
}

func newOneServer() *oneServer {
	return new(oneServer)
}

func (s *oneServer) describe() traits {
	return traits{self: s, probe: s.probe, outages: &s.outages, oneServer: true, parts: &s.parts}
}

// healthy waits until a limiter's process has noticed that the store is available, or that it is not. In a bubble it also waits until all
// limiters were notified. It returns the time that this took.
func healthy(t *testing.T, l *RateLimiter, want bool) time.Duration {
	t.Helper()
	began := time.Now()
	for (l.limiter.Coordinator.Down() == nil) != want {
		require.Less(t, time.Since(began), 20*time.Second, "the store is not known to be there: want %v", want)
		time.Sleep(time.Millisecond)
	}
	took := time.Since(began)
	time.Sleep(time.Millisecond)
	return took
}

// distant is a store that takes its time, and heeds contexts.
type distant struct {
	Store
	trip  atomic.Int64
	calls atomic.Int64
}

func (s *distant) Apply(ctx context.Context, b *Batch) error {
	s.calls.Add(1)
	if trip := time.Duration(s.trip.Load()); trip > 0 { // thousands of timers of 0 in a bubble crash the race detector
		select {
		case <-time.After(trip):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return s.Store.Apply(ctx, b)
}

// slow is a store whose requests and replies take time, now and then longer than any timeout. It blocks, so the engine calls it as it calls
// a Redis store.
type slow struct {
	store *MemoryStore
	delay func() time.Duration
}

func (s *slow) Apply(ctx context.Context, b *Batch) error {
	time.Sleep(s.delay())
	err := s.store.Apply(ctx, b)
	time.Sleep(s.delay())
	if rand.IntN(50) == 0 {
		return errors.New("reply lost")
	}
	return err
}

// apart is a MemoryStore that is asked as one behind a network is.
type apart struct{ *slow }

func newApart() *apart {
	return &apart{&slow{store: NewMemoryStore(), delay: func() time.Duration { return 0 }}}
}

// fakeRedis is a client of a server that supports only locks, probes and the count of instances. Its buckets contain no valid state.
type fakeRedis struct {
	redis.Scripter             // the stores have one of their own
	locked         atomic.Bool // another process holds every lock
	hangs          atomic.Bool // until the context ends
	late           atomic.Bool // scripts run when no caller waits for them any more
	instances      atomic.Int64
	refuses        atomic.Pointer[error] // the error of a request for the number of instances; nil for none
	beats          atomic.Int64
}

func (c *fakeRedis) Process(ctx context.Context, cmd redis.Cmder) error {
	if c.hangs.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	answer, err := c.answer(cmd)
	switch cmd := cmd.(type) {
	case script.Call:
		cmd.SetVal(answer)
	case script.Once:
		cmd.SetVal(strings.Join(answer, " "))
	}
	cmd.SetErr(err)
	return err
}

func (c *fakeRedis) answer(cmd redis.Cmder) ([]string, error) {
	now := fmt.Sprint(time.Now().UnixMicro())
	if cmd.Name() == "set" {
		return []string{"OK"}, nil
	}
	switch cmd.Args()[1] {
	case redisbucket.ApplyScript.SHA:
		if c.late.Load() {
			return []string{now, "late"}, nil
		}
		if c.locked.Load() {
			return []string{now, "locked 100"}, nil
		}
		return []string{now, "corrupt hello"}, nil
	case redisbucket.ExchangeScript.SHA:
		if c.locked.Load() {
			return []string{"locked", "100"}, nil
		}
		return []string{"read", now, "hello"}, nil
	case redisbucket.ReadScript.SHA:
		return []string{"found", now, "hello"}, nil
	case redisbucket.CommitScript.SHA, redisbucket.ClipScript.SHA:
		return []string{"done"}, nil
	case instances.Script.SHA:
		c.beats.Add(1)
		time.Sleep(time.Microsecond) // so that a bubble does not learn it before its test waits
		if err := c.refuses.Load(); err != nil {
			return nil, *err
		}
		return []string{fmt.Sprint(c.instances.Load())}, nil
	}
	if c.locked.Load() { // the lock's library asks for it
		return nil, redis.Nil
	}
	return []string{"OK"}, nil
}

// testLog writes to a test's log as long as it runs.
type testLog struct {
	mu   sync.Mutex
	t    testing.TB
	over bool
}

func (l *testLog) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.over {
		l.t.Log(strings.TrimSpace(string(line)))
	}
	return len(line), nil
}

// Logged has a limiter log to its test.
func Logged(t testing.TB) Option {
	log := &testLog{t: t}
	t.Cleanup(func() {
		log.mu.Lock()
		defer log.mu.Unlock()
		log.over = true
	})
	return WithLogger(slog.New(slog.NewTextHandler(log, nil)))
}

// recorder keeps the log, one line per message: level, message and attributes.
type recorder struct {
	mu    sync.Mutex
	lines []string
}

func (r *recorder) option() Option {
	return WithLogger(slog.New(slog.NewTextHandler(r, &slog.HandlerOptions{
		ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		},
	})))
}

func (r *recorder) Write(line []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lines = append(r.lines, strings.TrimSpace(string(line)))
	return len(line), nil
}

// logged returns the messages since the last call of logged.
func (r *recorder) logged() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	lines := r.lines
	r.lines = nil
	return lines
}

// Waiting is how many calls of a limiter's bucket have not ended.
func Waiting(l *RateLimiter) int {
	return look(l).Calls
}

// look returns the state of a limiter's coordinator.
func look(l *RateLimiter) (now engine.State) {
	l.limiter.Coordinator.Inspect(func(s engine.State) { now = s })
	return now
}

// whileStopped calls f while the process of a limiter does nothing: its timers and replies wait.
func whileStopped(l *RateLimiter, f func()) {
	l.limiter.Coordinator.Inspect(func(engine.State) { f() })
}

// newSession returns what a Redis store remembers of a bucket.
func newSession() permit.Session { return new(redisbucket.Session) }

// Calm reports whether a limiter's process does nothing before its next alarm, and when that rings; 0 if none is set. It is for tests with a fake clock.
func Calm(l *RateLimiter) (calm bool, alarm int64) {
	l.limiter.Coordinator.Inspect(func(s engine.State) {
		calm, alarm = !s.Busy && (s.AlarmAt == 0 || s.AlarmAt > l.limiter.Coordinator.Now()), s.AlarmAt
		if alarm != 0 {
			alarm -= l.limiter.Coordinator.Now()
		}
	})
	return calm, alarm
}

// InProgress returns how many calls of a limiter's process have not ended, and what stands for the process.
func InProgress(l *RateLimiter) (calls int, process any) { return look(l).Calls, l.limiter.Coordinator }

package tokenbucket

import (
	"context"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/instances"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// RateLimiter hands out permits at a steady rate from a bucket that it shares with all limiters of the same name on
// the same store: in other goroutines, other processes, on other machines. Its configuration is its own, the bucket's
// state ([PermitBucket]) is the store's.
//
// Rates are in permits per second; times are decided by the store's clock, and callers sleep by the limiter's
// ([WithClock]). Callers of one process are served first come, first served. All methods may be called by many
// goroutines at once. There is nothing to close, but for [WithPrefetch].
//
// Most callers want [RateLimiter.Try], [RateLimiter.TryAcquire] or [RateLimiter.Acquire]. A refusal is an answer (false), a
// failure is an error: what a failed store means for the call behind the limiter is the caller's decision.
//
// Every call returns when its context ends. Without a deadline, a call returns within its timeout plus the store's
// ([WithStoreTimeout], default 1 s), even when the store hangs; [RateLimiter.Acquire] within its wait plus the store's. With a
// failure policy that lets calls pass, those that notice an outage also wait for a probe (see [FailurePolicy]).
type RateLimiter struct {
	limiter  engine.Limiter
	own      *setting // its own configuration
	maxWait  time.Duration
	enabled  func() bool
	plain    bool // neither a policy, an observer nor a shadow
	policy   FailurePolicy
	member   *instances.Member // of those that a LocalShare is divided by
	parts    *MemoryStore      // has the bucket of a LocalShare
	share    atomic.Pointer[share]
	shadow   bool
	observer *Observer // nil if there is none
	label    string    // see WithLabel

	// Of a MemoryStore; nil for other stores.
	memory *MemoryStore
	slot   atomic.Pointer[memoryBucket] // the bucket; nil until it was looked up
	time   clock.Local
}

// effective returns the configuration in force, as far as this process knows.
func (l *RateLimiter) effective() *setting {
	if t := l.limiter.Effective(); t != &l.own.terms {
		return settingOf(t)
	}
	return l.own
}

// Name of the limiter and its bucket.
func (l *RateLimiter) Name() string { return l.limiter.Coordinator.Name }

// InForce describes the configuration in force in a bucket, as far as this process knows.
type InForce struct {
	// Own reports whether it is the limiter's own, apart from its version.
	Own bool
	// Rate in permits per second.
	Rate float64
	// Version of the configuration; 0 if it has none. See [WithVersion].
	Version int64
}

// InForce returns the configuration in force in the bucket, as the latest reply of the store showed it.
func (l *RateLimiter) InForce() InForce {
	own, there := l.own.config, l.effective().config
	own.Version = there.Version
	return InForce{Own: own == there, Rate: there.Rate, Version: there.Version}
}

// Rate is the configured permits per second, or what the fleet's newest configuration says once an answer brought it.
func (l *RateLimiter) Rate() float64 { return l.effective().Rate }

// LeastWait returns how long one permit takes at least, whatever the state of the bucket, by the limiter's own configuration. With a shorter
// timeout every call ends with [ErrNeverGranted]. It is 0 unless the bucket holds less than a permit, and for a limiter that warms up.
func (l *RateLimiter) LeastWait() time.Duration {
	if l.own.Kind != bursty || l.own.max >= 1 {
		return 0
	}
	return time.Duration(l.own.leastWait(1)) * time.Microsecond
}

// Try is [RateLimiter.TryAcquire] of one permit that waits at most as long as [WithMaxWait] says: half a second by default.
func (l *RateLimiter) Try(ctx context.Context) (bool, error) {
	return l.TryAcquire(ctx, 1, l.maxWait)
}

// TryAcquire takes permits and waits until they are due, if that is within the timeout; else it returns false and takes
// nothing. A timeout of 0 or less means that the permits must be due now.
//
// False mostly comes at once. It may come later if the timeout, or the wait of the callers ahead, is longer than a process may take
// permits ahead (see [RateLimiter.Acquire]). Even then it comes at once in two cases: the bucket as last seen, at most 100 ms ago, and
// the callers ahead leave no time; or the line of this process has moved too slowly. Else it comes as soon as an answer shows it, and at
// the timeout at the latest.
//
// If the context ends before the permits are due, they are given back and the context's error is returned. A wait that would end after
// the context's deadline is a [*WaitError] at once. So is a request that no state of the bucket could grant within the timeout
// ([ErrNeverGranted]).
func (l *RateLimiter) TryAcquire(ctx context.Context, permits int, timeout time.Duration) (bool, error) {
	v, err := l.decide(ctx, acquire, permits, timeout)
	return v.granted, err
}

// Acquire takes permits and waits until they are due, however long that is, and returns the time waited for them. Errors as
// [RateLimiter.TryAcquire], but never [ErrNeverGranted].
//
// A process takes permits at most a second ahead, or four permits' time if that is longer, and less if it owns some already. So
// processes at full demand get about equal parts of the rate, and a process that dies loses the fleet no more than that. Callers who
// must wait for longer wait in their process, in the same line, and it asks for their permits later.
func (l *RateLimiter) Acquire(ctx context.Context, permits int) (waited time.Duration, err error) {
	v, err := l.decide(ctx, acquire, permits, math.MaxInt64)
	if !v.granted {
		return 0, err
	}
	return v.wait, err
}

// Reserve takes permits, whenever they fall due, and returns at once. The caller waits for [Reservation.Ready] or
// [Reservation.Delay], or gives the permits back with [Reservation.Cancel] before they are due. It does not stand in the line of its
// process: it takes what the bucket has next. So it may pass, and delay, callers for whom their process has not taken permits yet
// (see [RateLimiter.Acquire]).
//
// Permits that fall due after the context's deadline are a [*WaitError], and are not taken. What is reserved stays so when the context
// ends. Other errors as [RateLimiter.Acquire].
func (l *RateLimiter) Reserve(ctx context.Context, permits int) (*Reservation, error) {
	return l.TryReserve(ctx, permits, math.MaxInt64)
}

// TryReserve takes permits if they fall due within the timeout, and returns at once. If not, the reservation is not OK
// and says when to try again. Otherwise as [RateLimiter.Reserve]; errors as [RateLimiter.TryAcquire].
func (l *RateLimiter) TryReserve(ctx context.Context, permits int, timeout time.Duration) (*Reservation, error) {
	v, err := l.decide(ctx, reserve, permits, timeout)
	if err != nil {
		return nil, err
	}
	if v.reservation == nil { // no bucket was asked
		return &Reservation{refused: !v.granted}, nil
	}
	return v.reservation, nil
}

// SetRate changes the rate for the whole fleet: it becomes the bucket's next version, and others learn it with their
// next answer. Max permits keep their size in seconds, stored permits their share of it, and debt stays as it is: a bucket of
// one permit at 0.01/s is one of 10,000 at 100/s. [RateLimiter.SetRateAndBurst] sets both.
//
// What SetRate sets is part of the bucket's state, and stays in force for as long as that lives: until [RateLimiter.Reset], a newer version
// ([WithVersion]), or a day after the bucket is full and nobody has asked. Limiters without a version follow it, also those of a later
// release of your program with another rate in its code; each process logs that once. If the state is lost, the next process to ask that
// has heard of the rate restores it. If none has, the rate is lost with the state. For a rate that must outlast Redis, keep it where your
// program reads its configuration, and give it a version.
func (l *RateLimiter) SetRate(ctx context.Context, permitsPerSecond float64) error {
	next := l.effective().config
	next.Size = float64(next.Size*permitsPerSecond) / next.Rate
	next.Rate = permitsPerSecond
	if err := next.validate(); err != nil {
		return invalid(l.Name(), err)
	}
	done, err := l.operate(ctx, &engine.Operation{Request: permit.Request{Op: permit.SetRate, Rate: permitsPerSecond}})
	if err != nil {
		return err
	}
	if !done {
		return invalid(l.Name(), wanted("permits per second", permitsPerSecond, "a rate that fits the configuration in force"))
	}
	return nil
}

// SetRateAndBurst changes the rate and max permits of a bursty bucket for the whole fleet, as [RateLimiter.SetRate] does, but
// neither follows from the other. permitsPerSecond is as for [NewSmoothBursty], maxPermits as for [WithMaxPermits]: 0 allows
// no burst. Debt stays as it is. So do stored permits, as far as there is room for them: no change fills a bucket.
//
// A limiter that warms up gets [ErrInvalidConfig]: its max permits follow from its warm-up period.
func (l *RateLimiter) SetRateAndBurst(ctx context.Context, permitsPerSecond, maxPermits float64) error {
	next := l.effective().config
	if next.Kind != bursty {
		return invalid(l.Name(), wanted("max permits", maxPermits, "a bursty limiter; one that warms up has SetRate"))
	}
	next.Rate = permitsPerSecond
	next.setMaxPermits(maxPermits)
	if err := next.validate(); err != nil {
		return invalid(l.Name(), err)
	}
	done, err := l.operate(ctx, &engine.Operation{
		Request: permit.Request{Op: permit.SetRateAndBurst, Rate: permitsPerSecond, MaxPermits: maxPermits},
	})
	if err != nil {
		return err
	}
	if !done {
		return invalid(l.Name(), wanted("version", l.effective().Version, "one below 2^53: there is no next one"))
	}
	return nil
}

// maxPenalty bounds Penalize, so that no upstream can shut a fleet out for long by one answer.
const maxPenalty = time.Hour

// Penalize holds the bucket back for the whole fleet: nothing falls due before d from now has passed by the store's clock.
// It is for an upstream that asks for it (429 with Retry-After). Reservations and callers without a limit, in any process, wait that much
// longer. Timeouts and deadlines of contexts stay: a call that would now be late is refused as soon as its process learns of the penalty.
// Permits saved up are dropped. Other processes learn of it with the next reply: within half a second, while a caller waits there, or half
// a millisecond for each bucket that is waited for there, if that is longer. Calls that they let go before that have gone. If there are
// several, the one that ends last counts. d is above 0 and at most an hour; [RateLimiter.Reset] ends the penalty at once. While the switch is
// off ([WithSwitch]) it does nothing.
func (l *RateLimiter) Penalize(ctx context.Context, d time.Duration) error {
	if d <= 0 || d > maxPenalty {
		return invalid(l.Name(), wanted("penalty", d, fmt.Sprintf("more than 0, at most %v", maxPenalty)))
	}
	if l.enabled != nil && !l.enabled() {
		return ctx.Err()
	}
	micros := int64((d + time.Microsecond - 1) / time.Microsecond)
	_, err := l.operate(ctx, &engine.Operation{Request: permit.Request{Op: permit.Hold, HoldMicros: micros}})
	return err
}

// State returns the bucket as it is now, and changes nothing.
func (l *RateLimiter) State(ctx context.Context) (PermitBucket, error) {
	read := &engine.Operation{Read: true}
	if _, err := l.operate(ctx, read); err != nil {
		return PermitBucket{}, err
	}
	return *read.State.(*PermitBucket), nil
}

// Reset begins the bucket anew with this limiter's own configuration: debt, penalty, version and what [RateLimiter.SetRate] set
// are dropped, and a bucket of the other kind is replaced.
// Reservations made before keep their times, less what was left of a penalty, and are not given back to the new bucket. So do callers whom
// their process owns permits for.
func (l *RateLimiter) Reset(ctx context.Context) error {
	_, err := l.operate(ctx, &engine.Operation{Request: permit.Request{Op: permit.Reset}})
	return err
}

// operate carries out an operation. It reports false if the store refused it.
func (l *RateLimiter) operate(ctx context.Context, o *engine.Operation) (done bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	c, q := l.limiter.Coordinator, engine.NewOperation(&l.limiter, o, deadlineOf(ctx))
	r := c.Wait(ctx, q, c.Submit(ctx, q))
	return r.Granted, r.Err
}

// Close gives back what the limiter has leased ([WithPrefetch]), and waits for the store's answer as long as the context and the store's
// timeout let it. A limiter without leases has nothing to close. It may be used afterwards, and leases no more. Closing twice does nothing.
func (l *RateLimiter) Close(ctx context.Context) error {
	if coming, err := l.limiter.Coordinator.CloseLeases(ctx, &l.limiter); err != nil || !coming {
		return err
	}
	if _, err := l.State(ctx); err != nil { // it is asked after the block has come, and gone back
		return fmt.Errorf("close: %w", err)
	}
	return nil
}

// Level is how full a bucket was after a decision.
type Level struct {
	// MaxPermits is the most that can be taken at once; of a bucket that warms up, 1. Rate is in permits per second.
	MaxPermits, Rate float64
	// Remaining permits could be taken without a wait.
	Remaining float64
	// Full is the time until MaxPermits could be taken without a wait, if nobody asks meanwhile.
	Full time.Duration
}

// level is how full a bucket is.
func (s *setting) level(m permit.Balance, now int64) *Level {
	m = s.Resync(m, now)
	debt := m.Next - now
	v := &Level{MaxPermits: 1, Rate: s.Rate, Full: time.Duration(debt) * time.Microsecond}
	switch {
	case s.Kind == bursty:
		v.MaxPermits = s.max
		micros := min(float64(debt)+float64((s.max-m.Stored)*s.interval), math.MaxInt64/2000)
		v.Full = time.Duration(max(0, s.ceil(micros))) * time.Microsecond
		if debt == 0 {
			v.Remaining = m.Stored
			if whole := math.Round(m.Stored); math.Abs(m.Stored-whole) < shortfall {
				v.Remaining = whole // so many pass at once
			}
		}
	case debt == 0:
		v.Remaining = 1
	}
	return v
}

// levelOf returns how full a bucket was in a reply; nil if none showed it.
func levelOf(s engine.Seen) *Level {
	if s.Terms == nil {
		return nil
	}
	return settingOf(s.Terms).level(s.Balance, s.Now)
}

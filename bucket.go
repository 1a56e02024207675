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

// RateLimiter grants permits at a steady rate from a bucket that it shares with all limiters of the same name on the same store: in other
// goroutines, other processes, and on other machines. Each limiter has its own configuration. The bucket's state ([PermitBucket]) is in the
// store.
//
// Rates are in permits per second. The store's clock decides when permits are due, and callers sleep by the limiter's clock ([WithClock]).
// Callers of one process are served first come, first served, or in turns ([WithFairness]). All methods are safe for concurrent use. Only a limiter with [WithPrefetch]
// needs to be closed.
//
// Most callers want [RateLimiter.Try], [RateLimiter.TryAcquire] or [RateLimiter.Acquire]. A refusal is a result (false), and a failure is
// an error. The caller decides what a failed store means for the call behind the limiter.
//
// Every call returns when its context ends. Without a deadline, a call returns within its timeout plus the store's ([WithStoreTimeout],
// default 1 s), even when the store hangs; [RateLimiter.Acquire] within its wait plus the store's. With a failure policy that lets calls
// pass, calls that notice an outage also wait for a probe (see [FailurePolicy]).
type RateLimiter struct {
	limiter  engine.Limiter
	own      *setting // its own configuration
	maxWait  time.Duration
	quota    *quota // that it was made for; nil if none
	enabled  func() bool
	plain    bool // neither a policy, an observer nor a shadow
	priority Priority
	policy   FailurePolicy
	member   *instances.Member // counted among the instances that a LocalShare is divided by
	parts    *MemoryStore      // holds the bucket of a LocalShare
	share    atomic.Pointer[share]
	shadow   bool
	observer *Observer // or nil
	settling Settlements
	settles  []*Settlements // that count its settlements, too
	label    string         // see WithLabel

	// Set only on a MemoryStore.
	memory *MemoryStore
	slot   atomic.Pointer[memoryBucket] // the bucket, or nil before it is looked up
	time   clock.Local

	store    Store               // that it was created with
	fairness *fairness           // nil if callers are served by arrival
	kin      atomic.Pointer[kin] // the limiters of ForPriority; nil before its first call

	groups    groups
	following *following // of a limiter of Following, which has none of the fields above but kin and settling; else nil
}

// effective returns the configuration in force, as of the latest reply that this process has received.
func (l *RateLimiter) effective() *setting {
	if t := l.limiter.Effective(); t != &l.own.terms {
		return settingOf(t)
	}
	return l.own
}

// Name returns the name of the limiter and its bucket.
func (l *RateLimiter) Name() string {
	if l.following != nil {
		if now := l.following.rule().Limiter; now != nil {
			return now.Name()
		}
		return l.following.name
	}
	return l.limiter.Coordinator.Name
}

// InForce describes the configuration in force in a bucket, as of the latest reply that this process has received.
type InForce struct {
	// Own reports whether it equals the limiter's own configuration, apart from the version.
	Own bool
	// Rate in permits per second.
	Rate float64
	// Version of the configuration; 0 if it has none. See [WithVersion].
	Version int64
}

// InForce returns the configuration in force in the bucket, as of the latest reply of the store to a call of any priority ([RateLimiter.ForPriority]).
//
// Without a limiter in force ([Following]) it is Own, with a rate of 0.
func (l *RateLimiter) InForce() InForce {
	if l = l.inUse(); l == nil {
		return InForce{Own: true}
	}
	own, there := l.own.config, l.newest().config
	own.Version = there.Version
	return InForce{Own: own == there, Rate: there.Rate, Version: there.Version}
}

// Rate returns the configured permits per second, or the rate of the newest configuration in the fleet once a reply has shown it. It is 0 if no
// limiter is in force ([Following]).
func (l *RateLimiter) Rate() float64 {
	if l = l.inUse(); l == nil {
		return 0
	}
	return l.effective().Rate
}

// LeastWait returns the shortest time that one permit takes in any state of the bucket, by the limiter's own configuration. With a shorter
// timeout every call returns [ErrNeverGranted]. It is 0 for a limiter that warms up, and for a bucket that holds at least one permit.
func (l *RateLimiter) LeastWait() time.Duration {
	if l = l.inUse(); l == nil || l.own.Kind != bursty || l.own.max >= 1 {
		return 0
	}
	return time.Duration(l.own.leastWait(1)) * time.Microsecond
}

// Try is [RateLimiter.TryAcquire] of one permit with the timeout of [WithMaxWait]: half a second by default.
func (l *RateLimiter) Try(ctx context.Context) (bool, error) {
	return l.TryAcquire(ctx, 1, l.patience())
}

// patience returns the timeout of Try.
func (l *RateLimiter) patience() time.Duration {
	if l = l.inUse(); l == nil {
		return 0
	}
	return l.maxWait
}

// TryAcquire takes permits and waits until they are due, if that is within the timeout. Otherwise it returns false and takes nothing. With
// a timeout of 0 or less, the permits must be due now.
//
// Refusals are usually immediate. If the timeout, or the wait of the callers ahead, exceeds the process's look-ahead (see
// [RateLimiter.Acquire]), the call may wait in the queue first. Even then it is refused at once in two cases. The bucket as of a reply at
// most 100 ms old, and the callers ahead, leave no time; or the process's queue has moved too slowly. Otherwise it is refused as soon as a
// reply shows that its permits cannot be due in time, and at the timeout at the latest.
//
// If the context ends before the permits are due, they are given back and TryAcquire returns the context's error. A wait that would end
// after the context's deadline is a [*WaitError] at once. So is a request that no state of the bucket could grant within the timeout
// ([ErrNeverGranted]).
func (l *RateLimiter) TryAcquire(ctx context.Context, permits int, timeout time.Duration) (bool, error) {
	v, err := l.decide(ctx, acquire, permits, timeout)
	return v.granted, err
}

// Acquire takes permits, waits until they are due, however long that is, and returns the time waited for them. Its errors are those of
// [RateLimiter.TryAcquire] except [ErrNeverGranted].
//
// The look-ahead of a process, which is how far ahead it takes permits, is at most a second, or the time of four permits if that is longer.
// It is less if the process owns some already. So processes at full demand get about equal shares of the rate, and a process that dies
// costs the fleet no more than its look-ahead. Callers beyond the look-ahead wait in the same queue of their process, which asks for their
// permits later.
func (l *RateLimiter) Acquire(ctx context.Context, permits int) (waited time.Duration, err error) {
	v, err := l.decide(ctx, acquire, permits, math.MaxInt64)
	if !v.granted {
		return 0, err
	}
	return v.wait, err
}

// Reserve takes permits, whenever they fall due, and returns at once. The caller waits for [Reservation.Ready] or [Reservation.Delay], or
// gives the permits back with [Reservation.Cancel] before they are due. A reservation does not join the queue of its process: it takes the
// next permits of the bucket. So it may pass, and delay, callers whose process has not taken permits for them yet (see
// [RateLimiter.Acquire]).
//
// If the permits fall due after the context's deadline, Reserve returns a [*WaitError] and takes nothing. A reservation outlives its
// context. Other errors are those of [RateLimiter.Acquire].
func (l *RateLimiter) Reserve(ctx context.Context, permits int) (*Reservation, error) {
	return l.TryReserve(ctx, permits, math.MaxInt64)
}

// TryReserve takes permits if they fall due within the timeout, and returns at once. Otherwise the reservation is not OK, and
// [Reservation.RetryAfter] returns when to try again. In all else it is [RateLimiter.Reserve]; its errors are those of
// [RateLimiter.TryAcquire].
func (l *RateLimiter) TryReserve(ctx context.Context, permits int, timeout time.Duration) (*Reservation, error) {
	v, err := l.decide(ctx, reserve, permits, timeout)
	if err != nil {
		return nil, err
	}
	return l.complete(reserve, v, permits, timeout), nil
}

// complete returns the reservation of a verdict on TryReserve or TryAwait, with all of its fields.
func (l *RateLimiter) complete(v verb, got verdict, permits int, timeout time.Duration) *Reservation {
	if l.following != nil {
		return got.reservation
	}
	if v == await {
		return l.completeAwaited(got, permits, timeout)
	}
	if got.reservation == nil { // decided without a bucket
		return &Reservation{refused: !got.granted}
	}
	if r := got.reservation; !r.refused {
		r.limiter, r.permits, r.quota = l, int64(permits), l.quota != nil
	}
	return got.reservation
}

// SetRate changes the rate for the whole fleet. The new rate becomes the bucket's next version, which other limiters receive with their
// next reply. Max permits keep their size in seconds, stored permits keep their share of max permits, and debt stays as it is: a bucket of
// one permit at 0.01/s is one of 10,000 at 100/s. [RateLimiter.SetRateAndBurst] sets both.
//
// The new rate is part of the bucket's state, and stays in force until [RateLimiter.Reset], a newer version ([WithVersion]), or the end of
// the state, which is a day after the bucket is full and no longer used. Limiters without a version follow it, even those of a later
// release of your program with another rate in its code; each process logs that once. If the state is lost, the next process that uses the
// bucket and has received the rate restores it. If no such process exists, the rate is lost with the state. For a rate that must outlast
// Redis, keep it where your program reads its configuration, and give it a version.
//
// A limiter of [NewQuota] returns [ErrInvalidConfig], because more than one permit could then be stored: it has [RateLimiter.SetQuota].
func (l *RateLimiter) SetRate(ctx context.Context, permitsPerSecond float64) error {
	l, err := l.operated()
	if err != nil {
		return err
	}
	if l.quota != nil {
		return invalid(l.Name(), wanted("permits per second", permitsPerSecond, "SetQuota for a quota"))
	}
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

// SetRateAndBurst changes the rate and max permits of a bursty bucket for the whole fleet, as [RateLimiter.SetRate] does, but neither
// follows from the other. permitsPerSecond is as for [NewSmoothBursty], maxPermits as for [WithMaxPermits]: 0 allows no burst. Debt stays
// as it is. So do stored permits, as far as there is room for them: no change fills a bucket.
//
// A limiter that warms up gets [ErrInvalidConfig], because its max permits follow from its warm-up period. So does a limiter of [NewQuota],
// which has [RateLimiter.SetQuota].
func (l *RateLimiter) SetRateAndBurst(ctx context.Context, permitsPerSecond, maxPermits float64) error {
	l, err := l.operated()
	if err != nil {
		return err
	}
	if l.quota != nil {
		return invalid(l.Name(), wanted("max permits", maxPermits, "SetQuota for a quota"))
	}
	return l.setRateAndBurst(ctx, permitsPerSecond, maxPermits)
}

func (l *RateLimiter) setRateAndBurst(ctx context.Context, permitsPerSecond, maxPermits float64) error {
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

// maxPenalty bounds Penalize, so that one reply of an upstream cannot block a fleet for long.
const maxPenalty = time.Hour

// Penalize pauses the bucket for the whole fleet: nothing falls due until d from now has passed by the store's clock. It is for an upstream
// that asks for a pause (429 with Retry-After). d is above 0 and at most an hour. If there are several penalties, the one that ends last
// counts; [RateLimiter.Reset] ends the penalty at once. While the switch is off ([WithSwitch]), Penalize does nothing.
//
// Reservations and calls without a timeout, in any process, wait that much longer. Timeouts and context deadlines stay: a call that would
// now be late is refused as soon as its process has received the penalty. Stored permits are dropped. A bucket that warms up cools down, as it does in
// d without a call.
//
// Other processes receive the penalty with their next reply. While a caller waits there, that is within half a second, or half a
// millisecond for each bucket with waiters there, if that is longer. Calls that they have granted before are not affected.
func (l *RateLimiter) Penalize(ctx context.Context, d time.Duration) error {
	if d <= 0 || d > maxPenalty {
		return invalid(l.Name(), wanted("penalty", d, fmt.Sprintf("more than 0, at most %v", maxPenalty)))
	}
	if l.following != nil {
		if r := l.following.rule(); r.Limiter == nil && r.Err == nil {
			return ctx.Err()
		}
	}
	l, err := l.operated()
	if err != nil {
		return err
	}
	if l.enabled != nil && !l.enabled() {
		return ctx.Err()
	}
	micros := int64((d + time.Microsecond - 1) / time.Microsecond)
	_, err = l.operate(ctx, &engine.Operation{Request: permit.Request{Op: permit.Hold, HoldMicros: micros}})
	return err
}

// State returns the bucket as it is now. It changes nothing.
func (l *RateLimiter) State(ctx context.Context) (PermitBucket, error) {
	l, err := l.operated()
	if err != nil {
		return PermitBucket{}, err
	}
	read := &engine.Operation{Read: true}
	if _, err := l.operate(ctx, read); err != nil {
		return PermitBucket{}, err
	}
	return *read.State.(*PermitBucket), nil
}

// Reset replaces the bucket by a new one with this limiter's own configuration. Debt, penalty, version and the changes of
// [RateLimiter.SetRate] are dropped, and a bucket of the other kind is replaced. Earlier reservations keep their due times, less the rest
// of a penalty, and are not given back to the new bucket. The same holds for callers for whom their process owns permits.
//
// A bucket of a quota ([NewQuota]) keeps its debt and what it has stored, because more calls than the quota would fall into a window otherwise. If that
// lowers the quota, it does so as [RateLimiter.SetQuota].
func (l *RateLimiter) Reset(ctx context.Context) error {
	l, err := l.operated()
	if err != nil {
		return err
	}
	op := permit.Reset
	if l.quota != nil {
		op = permit.ResetQuota
	}
	_, err = l.operate(ctx, &engine.Operation{Request: permit.Request{Op: op}})
	return err
}

// operated returns the limiter that operations are for.
func (l *RateLimiter) operated() (*RateLimiter, error) {
	if l.following != nil {
		return l.following.limiter()
	}
	return l, nil
}

// operate sends an operation and waits for its result. It reports false if the store refused the operation.
func (l *RateLimiter) operate(ctx context.Context, o *engine.Operation) (done bool, err error) {
	if err := ctx.Err(); err != nil {
		return false, err
	}
	c, q := l.limiter.Coordinator, engine.NewOperation(&l.limiter, o, deadlineOf(ctx))
	r := c.Wait(ctx, q, c.Submit(ctx, q))
	return r.Granted, r.Err
}

// Close gives back the unused permits of the limiter's leases ([WithPrefetch]), and waits for the store's reply as long as the context and the
// store's timeout allow. It also waits for the settlements of [Reservation.SettleLater] that have begun, those of [RateLimiter.ForPriority]
// included. A limiter without leases and settlements need not be closed. A closed limiter may still be used, but it takes no more leases.
// Closing twice does nothing.
func (l *RateLimiter) Close(ctx context.Context) error {
	if err := l.settled(ctx); err != nil {
		return fmt.Errorf("close: %w", err)
	}
	if l.following != nil {
		if now := l.inUse(); now != nil {
			return now.Close(ctx)
		}
		return nil
	}
	if coming, err := l.limiter.Coordinator.CloseLeases(ctx, &l.limiter); err != nil || !coming {
		return err
	}
	if _, err := l.State(ctx); err != nil { // the store replies after the block has arrived and was given back
		return fmt.Errorf("close: %w", err)
	}
	return nil
}

// Level is the fill level of a bucket after a decision.
type Level struct {
	// MaxPermits is the most permits that can be taken at once, 1 for a bucket that warms up. Rate is in permits per second.
	MaxPermits, Rate float64
	// Remaining is the number of permits that could be taken without a wait.
	Remaining float64
	// Full is the time until MaxPermits could be taken without a wait, if there are no requests meanwhile.
	Full time.Duration
}

// level returns the fill level of a bucket.
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
				v.Remaining = whole // the number of calls that pass at once
			}
		}
	case debt == 0:
		v.Remaining = 1
	}
	return v
}

// levelOf returns the fill level that a reply showed, or nil if no reply showed one.
func levelOf(s engine.Seen) *Level {
	if s.Terms == nil {
		return nil
	}
	return settingOf(s.Terms).level(s.Balance, s.Now)
}

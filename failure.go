package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// ErrStoreUnavailable: the store failed just now and has not answered since, so it was not asked. What wraps it names the
// failure. A Store of one's own wraps it to say that it cannot be reached.
var ErrStoreUnavailable = errors.New("tokenbucket: store unavailable")

// FailurePolicy is what a call for permits gets while the store is away. The zero value is FailClosed.
//
// Away means that it cannot be reached, does not answer in time (WithStoreTimeout), or says that it cannot serve now: it is
// loading, a replica, full, or its cluster is down. What somebody must repair is never taken for that, and is an error under
// every policy: a wrong password (NOAUTH, WRONGPASS), missing rights (NOPERM), a certificate that is not trusted, a key that
// holds something else (WRONGTYPE, ErrCorruptState), bad input, a context that has ended, or a lock that others hold for too
// long (ErrLockNotObtained). A name that DNS does not know is an outage: it may come back.
//
// A process notices an outage when a call fails and a probe, sent at once, does so too or is not answered within 250 ms (three
// times the round trip if that is longer, 1 s as long as nothing was ever answered, but no longer than the store's timeout).
// From then on calls cost no more than a lock and the error or the decision in its place; the store is probed every 100 ms, and
// asked again as soon as it answers. Processes notice by themselves. With a cluster or a ring it is noticed bucket by bucket,
// since others may live on servers that are well; with more than 32 buckets away each is probed less often, at last once a
// second.
//
// SetRate, Penalize, Reset and State always return the failure, and so does Cancel, if it has anything to tell the store: while
// a batch is under way it returns at once, and the permits may be lost.
type FailurePolicy struct {
	mode      failureMode
	instances int
}

type failureMode uint8

const (
	failClosed failureMode = iota
	failOpen
	localShare
)

var (
	// FailClosed returns the failure as an error: what it means for the call behind the limiter is its caller's decision.
	FailClosed = FailurePolicy{}
	// FailOpen lets calls pass, unlimited, as if the switch were off.
	FailOpen = FailurePolicy{mode: failOpen}
)

// LocalShare decides by a bucket in this process, with its share of the rate and of max permits: divided by the number of
// live instances. While the store is there, every process with such a limiter leaves a sign of life in it every two seconds
// (in the Redis stores; one small script a process), and learns how many others do: who was last seen within seven seconds
// counts, and the largest number of the last seven seconds. As long as no number is known, and with other stores, it is the
// given one, at least 1.
//
// Counted are stores, by key prefix: make one for each Redis and process, and give each fleet a prefix of its own
// (WithKeyPrefix).
//
// The local bucket begins empty, once what this process has reserved is through. So in T seconds of an outage the fleet lets
// go at most rate × T permits, if all its instances had been counted, besides those that were reserved before; with PayLater
// also one request of each process, which the others pay for. What is reserved in an outage falls due as reserved, even when
// the store is back, beside what it grants. A request that no state of the smaller bucket could grant within its timeout is
// refused.
func LocalShare(instances int) FailurePolicy {
	return FailurePolicy{mode: localShare, instances: instances}
}

// String is FailClosed, FailOpen or LocalShare(n).
func (p FailurePolicy) String() string {
	switch p.mode {
	case failOpen:
		return "FailOpen"
	case localShare:
		return fmt.Sprintf("LocalShare(%d)", p.instances)
	}
	return "FailClosed"
}

// WithFailurePolicy sets what a call gets while the store is away. Default FailClosed.
func WithFailurePolicy(p FailurePolicy) Option {
	return func(o *options) {
		if p.mode == localShare && p.instances < 1 {
			o.fail("failure policy", p, "a local share of at least 1 instance")
		}
		o.policy = p
	}
}

// away tells whether an error means that the store cannot be asked now, rather than that somebody must repair something.
func away(err error) bool {
	var wait *WaitError
	switch {
	case err == nil, errors.As(err, &wait), errors.Is(err, ErrLockNotObtained), errors.Is(err, ErrCorruptState), script.Lasting(err):
		return false
	case errors.Is(err, ErrStoreTimeout), errors.Is(err, ErrStoreUnavailable):
		return true
	}
	return script.Away(err)
}

// instead is what the policy says when the store could not be asked: whether the call passes, after what wait. It returns the
// error if the policy has nothing to say of it.
func (l *RateLimiter) instead(ctx context.Context, v verdict, err error, ask func(*RateLimiter) (verdict, error)) (verdict, error) {
	locked := errors.Is(err, ErrLockNotObtained) // and perhaps its holder waits for a store that has gone
	if l.policy.mode == failClosed || ctx.Err() != nil || !away(err) && !locked {
		return v, err
	}
	if l.line.down() == nil { // a server that shuts out who has no right to be there looks like one that has gone
		patience, cancel := context.WithTimeout(ctx, l.line.health.patience(l.line.timeout)) // the probe may be that of one with more
		probed := l.line.health.ask(patience, l.line)
		cancel()
		switch {
		case ctx.Err() != nil:
			return v, ctx.Err()
		case probed != nil && !away(probed):
			return v, fmt.Errorf("%w; %w", probed, err)
		case locked && probed == nil:
			return v, err
		}
	}
	if l.policy.mode == failOpen {
		return verdict{granted: true, by: ByPolicy}, nil
	}
	local, invalid := l.locally()
	if invalid != nil {
		return verdict{}, fmt.Errorf("%w; and no local share: %w", err, invalid)
	}
	v, invalid = ask(local)
	v.by = ByPolicy
	var never *WaitError
	switch {
	case !errors.Is(invalid, ErrInvalidPermits):
		return v, invalid
	case errors.As(invalid, &never):
		return verdict{by: ByPolicy}, nil // the whole bucket could grant it in time
	}
	return v, fmt.Errorf("%w; and no local share: %w", err, invalid)
}

// share is a limiter of this process's part of a bucket.
type share struct {
	whole     Config
	instances int
	limiter   *RateLimiter
}

// locally is the limiter that decides while the store is away.
func (l *RateLimiter) locally() (*RateLimiter, error) {
	n := l.policy.instances
	if l.member != nil {
		if counted := l.member.live.Load(); counted > 0 {
			n = int(counted)
		}
	}
	whole := l.effective().Config
	if s := l.share.Load(); s != nil && s.whole == whole && s.instances == n {
		l.line.part(s.limiter)
		return s.limiter, nil
	}
	c := whole
	c.Version = 0
	c.Rate /= float64(n)
	c.Size /= float64(n)
	if err := c.validate(); err != nil {
		return nil, fmt.Errorf("bucket %q: divided by %d instances: %w", l.Name(), n, err)
	}
	part := &RateLimiter{own: newSetting(c), horizon: l.horizon, plain: true, maxWaiters: l.maxWaiters}
	l.line.part(part)
	l.share.Store(&share{whole, n, part})
	return part, nil
}

// part gives a limiter the line of this process's part of the bucket, while the store is away: the same in every outage, so that what was
// reserved in one counts in the next. In another outage, or if the store has served the bucket meanwhile, it begins empty, once
// what is reserved in the bucket itself is through, or a penalty that is known of; nobody who waits already waits for the former.
func (l *line) part(limiter *RateLimiter) {
	l.mu.Lock()
	defer l.mu.Unlock()
	begins := l.served
	if l.local == nil {
		l.local, begins = newLine(l.parts, l.name, l.clock, 0), true // whatever their timeouts, all limiters of the name share it
	}
	if o := l.down(); o != nil && o != l.outage {
		l.outage, begins = o, true
	}
	p := l.local
	if limiter.line == nil {
		limiter.line = p
	}
	if !begins {
		return
	}
	l.served = false
	now := l.now()
	ahead := max(1, l.heldTill-now) // at least that: a hold drops what is saved up
	p.mu.Lock()
	idle := p.lastDue <= now
	p.mu.Unlock()
	if idle {
		ahead = max(ahead, l.lastDue-now)
	}
	p.submit(context.Background(), &call{limiter: limiter, op: OpHold, hold: ahead, ready: make(chan struct{})})
}

// down is the outage that was noticed, or nil.
func (l *line) down() *outage {
	if l.health == nil {
		return nil
	}
	return l.health.now.Load()
}

// ground fails all who want to ask the store, which is away.
func (l *line) ground(o *outage) {
	l.health.suspect(l)
	l.listened = l.now()
	err := fmt.Errorf("%w: bucket %q: since %v: %w", ErrStoreUnavailable, l.label(), time.Since(o.since).Round(time.Millisecond), o.err)
	var promised []*call
	for _, c := range l.queue {
		if !c.done && c.fail(err) {
			promised = append(promised, c)
		}
	}
	l.queue, l.refill = nil, false
	for _, b := range l.backs {
		l.returned(b, false, err)
		b.err = err
		if b.done != nil {
			close(b.done)
		}
	}
	l.backs = nil
	l.retry(promised)
}

// placeholder is for asking a store that need not answer anything.
var placeholder = Config{Kind: Bursty, Rate: 1, Size: 1, Floor: 1}

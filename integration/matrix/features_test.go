package matrix

import (
	"context"
	"math/rand/v2"
	"strconv"
	"time"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/tokenbuckettest"
)

// feature is one row and one column of the matrix. What it does not set, it leaves as it is.
type feature struct {
	name string
	// limit changes how the limiters of the cell are made.
	limit func(c *cell, s *spec)
	// face returns the limiter of a lower priority, which some of the callers use instead of l. The others use l.
	face func(l *tb.RateLimiter) *tb.RateLimiter
	// target returns what the callers call: a group or a choice of which the limiter is a member.
	target func(c *cell, s *spec, store tb.Store, l *tb.RateLimiter) (target, error)
	// call makes one call and returns the permits that it used. Half of the callers make it, or all if both features have one.
	call func(c *cell, ctx context.Context, by target) (used int, err error)
	// leaves is set if callers give up: a cell has other callers, too.
	leaves bool
	// disturb runs once beside the callers. Its changes of what is possible go to the cell.
	disturb func(c *cell, ctx context.Context) error
	// everywhere is set if disturb must run in each process.
	everywhere bool
}

// features are all rows. A new feature is one line here.
var features = []feature{
	// The verbs.
	{name: "Acquire", call: func(_ *cell, ctx context.Context, by target) (int, error) { return 1, by.Acquire(ctx, 1) }},
	{name: "TryAcquire", call: func(_ *cell, ctx context.Context, by target) (int, error) {
		return granted(by.TryAcquire(ctx, 1, patience))
	}},
	{name: "Try", call: func(_ *cell, ctx context.Context, by target) (int, error) { return granted(by.Try(ctx)) }},
	{name: "Reserve", call: func(_ *cell, ctx context.Context, by target) (int, error) {
		return held(by.Reserve(ctx, 1))(func(r reservation) (int, error) { return ready(ctx, r, 1) })
	}},
	{name: "TryReserve", call: func(_ *cell, ctx context.Context, by target) (int, error) {
		return held(by.TryReserve(ctx, 1, patience))(func(r reservation) (int, error) { return ready(ctx, r, 1) })
	}},
	{name: "TryAwait", call: func(_ *cell, ctx context.Context, by target) (int, error) {
		return held(by.TryAwait(ctx, 1, patience))(func(reservation) (int, error) { return 1, nil })
	}},
	// Giving up.
	{name: "context ends", leaves: true, call: func(_ *cell, ctx context.Context, by target) (int, error) {
		mine, cancel := context.WithTimeout(ctx, time.Duration(rand.IntN(60_000))*time.Microsecond)
		defer cancel()
		gone, leave := context.WithCancel(ctx) // without a deadline, which would refuse the call at once
		defer leave()
		defer context.AfterFunc(mine, leave)()
		if err := by.Acquire(gone, 1); err != nil {
			if gone.Err() != nil {
				return 0, nil
			}
			return 0, err
		}
		return 1, nil
	}},
	{name: "Cancel", leaves: true, call: func(_ *cell, ctx context.Context, by target) (int, error) {
		return held(by.TryReserve(ctx, 1, patience))(func(r reservation) (int, error) {
			if r.Delay() == 0 {
				return ready(ctx, r, 1)
			}
			sleep(ctx, r.Delay()/2)
			select {
			case <-r.Ready():
				return 1, nil
			default:
				if err := r.Cancel(background); err != nil {
					return 0, err
				}
			}
			select {
			case <-r.Ready(): // it fell due in the same instant
				return 1, nil
			default:
				return 0, nil
			}
		})
	}},
	{name: "Return", leaves: true, call: func(_ *cell, ctx context.Context, by target) (int, error) {
		n, err := held(by.TryReserve(ctx, 1, patience))(func(r reservation) (int, error) { return 0, r.Return(background) })
		sleep(ctx, 10*time.Millisecond) // the work that another limit has refused
		return n, err
	}},
	// Settling.
	{name: "Settle down", limit: settles(4, 2), call: settling(4, 2, false)},
	{name: "Settle up", limit: settles(1, 3), call: settling(1, 3, false)},
	{name: "SettleLater", limit: settles(4, 2), call: settling(4, 2, true)},
	// Who is served.
	{name: "Low", face: func(l *tb.RateLimiter) *tb.RateLimiter { return l.ForPriority(tb.Low) }},
	{name: "Lowest", face: func(l *tb.RateLimiter) *tb.RateLimiter { return l.ForPriority(tb.Lowest) }},
	{name: "WithFairness", limit: func(_ *cell, s *spec) {
		s.opts = append(s.opts, tb.WithFairness(func(ctx context.Context) string { n, _ := ctx.Value(callerKey{}).(int); return strconv.Itoa(tenant(n)) }))
	}},
	// Several limits.
	{name: "All", target: func(_ *cell, s *spec, store tb.Store, l *tb.RateLimiter) (target, error) {
		second, err := s.build("wide", 2*rate, store)
		if err != nil {
			return nil, err
		}
		g, err := tb.All(l, second)
		return all{g}, err
	}},
	{name: "Any", target: func(c *cell, s *spec, store tb.Store, l *tb.RateLimiter) (target, error) {
		second, err := s.build("second", rate, store)
		if err != nil {
			return nil, err
		}
		c.Second = true
		g, err := tb.Any(l, second)
		return choice{g}, err
	}},
	// Rows of a registry.
	{name: "row", limit: func(_ *cell, s *spec) { s.row = true }},
	{name: "row that changes", everywhere: true, limit: func(_ *cell, s *spec) { s.row = true }, disturb: func(c *cell, ctx context.Context) error {
		sleep(ctx, c.lasts/2)
		return c.faster(func() error { return c.rows.change(ctx) }, true)
	}},
	{name: "window and places", limit: func(_ *cell, s *spec) { s.row, s.places = true, true }, call: func(c *cell, ctx context.Context, by target) (int, error) {
		r, err := by.registry()
		if err != nil {
			return 0, err
		}
		a, err := r.Enter(ctx, c.name)
		if err != nil || !a.OK {
			return 0, err
		}
		a.Leave()
		return 1, nil
	}},
	// Kinds of limits.
	{name: "NewQuota", limit: func(_ *cell, s *spec) { s.quota = true }},
	{name: "warm-up", limit: func(c *cell, s *spec) { s.warmup = warmup; c.less(coldStart, 0) }},
	{name: "PayLater", limit: func(c *cell, s *spec) { s.opts = append(s.opts, tb.WithPayment(tb.PayLater)); c.less(0, 4) }},
	{name: "WithPrefetch", limit: func(c *cell, s *spec) {
		s.opts = append(s.opts, tb.WithPrefetch(50*time.Millisecond))
		c.less(0, 2*0.05*rate)
	}},
	{name: "WithVersion", limit: func(_ *cell, s *spec) { s.version = 7 }},
	{name: "WithShadow", limit: func(c *cell, s *spec) { s.shadow = true; s.opts = append(s.opts, tb.WithShadow()); c.Free = true }},
	{name: "WithSwitch", everywhere: true, limit: func(c *cell, s *spec) {
		c.Free = true
		s.opts = append(s.opts, tb.WithSwitch(func() bool { return !c.off.Load() }))
	}, disturb: func(c *cell, ctx context.Context) error {
		sleep(ctx, c.lasts/3)
		c.off.Store(true)
		sleep(ctx, c.lasts/3)
		c.off.Store(false)
		return nil
	}},
	// Operators.
	{name: "SetRate", disturb: func(c *cell, ctx context.Context) error {
		sleep(ctx, c.lasts/2)
		return c.faster(func() error { return c.limiters[0].SetRate(ctx, faster) }, false)
	}},
	{name: "SetRateAndBurst", disturb: func(c *cell, ctx context.Context) error {
		sleep(ctx, c.lasts/2)
		return c.faster(func() error { return c.limiters[0].SetRateAndBurst(ctx, faster, burst) }, false)
	}},
	{name: "SetQuota", limit: func(_ *cell, s *spec) { s.quota = true }, disturb: func(c *cell, ctx context.Context) error {
		sleep(ctx, c.lasts/2)
		return c.faster(func() error { return c.limiters[0].SetQuota(ctx, faster, time.Second, 0) }, false)
	}},
	{name: "Penalize", disturb: func(c *cell, ctx context.Context) error {
		sleep(ctx, c.lasts/2)
		c.less(penalty.Seconds()*rate, 0)
		if c.has("warm-up") { // nobody calls the upstream meanwhile, so it is as cold afterwards as at the start
			c.less(coldStart, 0)
		}
		return c.limiters[0].Penalize(ctx, penalty)
	}},
	{name: "Reset", disturb: func(c *cell, ctx context.Context) error {
		sleep(ctx, 2*c.lasts/3) // after the others
		c.less(0, c.owned())
		if c.has("SetQuota") {
			// The quota is lowered to the limiter's own, in a new epoch: what the callers own of the raised one lapses, and the lowered one begins
			// where the bucket's debt ends (docs/consistency.md, "A lowered quota"). A caller owns one permit at most.
			c.less(callers*rate/faster, 0)
		}
		err := c.limiters[0].Reset(ctx)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.ResetAt = c.now()
		return err
	}},
	// The store is away.
	{name: "FailClosed", everywhere: true, limit: func(_ *cell, s *spec) { s.opts = append(s.opts, tb.WithFailurePolicy(tb.FailClosed)) }, disturb: outage},
	{name: "FailOpen", everywhere: true, limit: func(c *cell, s *spec) {
		c.Free = true
		s.opts = append(s.opts, tb.WithFailurePolicy(tb.FailOpen))
	}, disturb: outage},
	{name: "LocalShare", everywhere: true, limit: func(c *cell, s *spec) {
		s.opts = append(s.opts, tb.WithFailurePolicy(tb.LocalShare(2)))
		c.less(0, c.owned()+2*rate*away.Seconds())
	}, disturb: outage},
}

// outage lets the store be away for a while. The permits of that time are lost, and those until a probe has noticed that it is back.
func outage(c *cell, ctx context.Context) error {
	sleep(ctx, c.lasts/3)
	c.away.Store(true)
	for _, s := range c.stores {
		s.Fail(tokenbuckettest.Outage())
	}
	sleep(ctx, away)
	for _, s := range c.stores {
		s.Restore()
	}
	c.less((away.Seconds()+0.3)*rate, 0)
	return nil
}

// settling returns a call of one number of permits that uses another.
func settling(asked, used int, later bool) func(*cell, context.Context, target) (int, error) {
	return func(c *cell, ctx context.Context, by target) (int, error) {
		return held(by.TryReserve(ctx, asked, patience))(func(r reservation) (int, error) {
			n, err := ready(ctx, r, asked)
			if n == 0 {
				return 0, err
			}
			if later {
				r.SettleLater(used)
				return used, nil
			}
			return used, r.Settle(background, used)
		})
	}
}

// settles accounts for calls that are not settled yet: what they asked for beyond their use is taken, and what they use beyond it is charged later.
func settles(asked, used int) func(*cell, *spec) {
	return func(c *cell, _ *spec) { c.less(float64(max(0, asked-used))*callers, c.owned()) }
}

// granted turns a verb's result into the permits used.
func granted(ok bool, err error) (int, error) {
	if !ok {
		return 0, err
	}
	return 1, err
}

// held calls use with a reservation, if there is one.
func held(r reservation, err error) func(use func(reservation) (int, error)) (int, error) {
	return func(use func(reservation) (int, error)) (int, error) {
		if err != nil || !r.OK() {
			return 0, err
		}
		return use(r)
	}
}

// ready waits until the permits of a reservation are due, or gives them back at the end.
func ready(ctx context.Context, r reservation, n int) (int, error) {
	select {
	case <-r.Ready():
		return n, nil
	case <-ctx.Done():
		return 0, r.Cancel(background)
	}
}

// sleep waits for d or the end of the context.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// callerKey is the key of a caller's number in its context.
type callerKey struct{}

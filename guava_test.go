package tokenbucket_test

import (
	"encoding/json"
	"math"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// guavaTrace is what Guava 31.1's RateLimiter did, step by step, under a virtual clock.
type guavaTrace struct {
	Name             string
	Kind             string
	PermitsPerSecond float64
	MaxBurstSeconds  float64
	WarmupMicros     int64
	ColdFactor       float64
	StartMicros      int64
	Initial          guavaState
	Steps            []guavaStep
}

type guavaStep struct {
	Op               string
	Permits          int
	Micros           int64
	TimeoutMicros    int64
	WaitMicros       int64
	OK               bool
	PermitsPerSecond float64
	NowMicros        int64
	State            guavaState
}

type guavaState struct {
	StoredPermits, MaxPermits, StableIntervalMicros float64
	NextFreeTicketMicros                            int64
}

// whole reports whether all costs of the trace are whole microseconds, and all permits whole numbers. With fractions, Guava's truncation
// turns float noise into a microsecond.
func (g *guavaTrace) whole() bool {
	return !slices.ContainsFunc(g.Steps, func(s guavaStep) bool {
		interval, since := s.State.StableIntervalMicros, float64(s.NowMicros-g.StartMicros)
		return interval != math.Trunc(interval) || math.Mod(since, interval) != 0 || s.State.StoredPermits != math.Trunc(s.State.StoredPermits)
	})
}

func guavaTraces(t testing.TB, file string) []guavaTrace {
	data, err := os.ReadFile("testdata/guava/" + file)
	require.NoError(t, err)
	var set struct{ Traces []guavaTrace }
	require.NoError(t, json.Unmarshal(data, &set))
	require.NotEmpty(t, set.Traces)
	return set.Traces
}

// Every trace, on every store. Outside of CI the stores in Redis replay the classics and every fifth of the random traces:
// TestDifferential compares what they compute with Go's.
//
// Guava truncates up to three fractions of a microsecond per reservation where this library carries them on, so after k
// reservations times may differ by 3k + 1 µs (warm-up: ten times that, since stored permits that differ a little feed back
// through the curve), and stored permits by what that time is worth.
func TestGuava(t *testing.T) {
	classics, random := guavaTraces(t, "classics.json"), guavaTraces(t, "random-open.json")
	all, sample := slices.Concat(classics, random), slices.Clone(classics)
	require.Len(t, all, 212)
	picked := tb.Sized(len(random), len(random)/5)
	for i := range picked {
		sample = append(sample, random[i*len(random)/picked])
	}
	onEveryStore(t, func(t *testing.T, _ *clockwork.FakeClock, open func() tb.Store) {
		traces := sample
		if _, ok := open().(*tb.MemoryStore); ok {
			traces = all
		}
		steps, exact := 0, 0
		for _, trace := range traces {
			t.Run(trace.Name, func(t *testing.T) {
				g := &guavaReplay{T: t, trace: trace, store: open(), clock: clockwork.NewFakeClockAt(time.UnixMicro(trace.StartMicros))}
				g.run()
			})
			if trace.Kind == "bursty" && trace.whole() {
				exact++
			}
			steps += len(trace.Steps)
		}
		t.Logf("%d traces, %d steps; %d of the traces to the microsecond", len(traces), steps, exact)
	})
}

type guavaReplay struct {
	*testing.T
	trace        guavaTrace
	store        tb.Store
	clock        *clockwork.FakeClock
	limiter      *tb.RateLimiter
	version      int64
	reservations int64
}

// configure makes a limiter of Guava's configuration at a rate.
func (g *guavaReplay) configure(rate float64) (ok bool) {
	opts := []tb.Option{tb.WithStore(g.store), patient, tb.WithClock(g.clock), tb.WithPayment(tb.PayLater), tb.WithVersion(g.version)}
	var err error
	if g.trace.Kind == "warmup" {
		if !(g.trace.ColdFactor > 1) {
			_, err = tb.NewSmoothWarmingUp(g.trace.Name, rate, time.Second, tb.WithColdFactor(g.trace.ColdFactor))
			require.ErrorIs(g, err, tb.ErrInvalidConfig) // Guava lets it pass
			return false
		}
		g.limiter, err = tb.NewSmoothWarmingUp(g.trace.Name, rate, time.Duration(g.trace.WarmupMicros)*time.Microsecond,
			append(opts, tb.WithColdFactor(g.trace.ColdFactor))...)
	} else {
		most := g.trace.MaxBurstSeconds * rate
		g.limiter, err = tb.NewSmoothBursty(g.trace.Name, rate,
			append(opts, tb.WithMaxPermits(most), tb.WithInitialPermits(min(most, g.trace.Initial.StoredPermits)))...)
	}
	require.NoError(g, err)
	return true
}

func (g *guavaReplay) run() {
	if !g.configure(g.trace.PermitsPerSecond) {
		return
	}
	require.NoError(g, g.limiter.Reset(ctx)) // Guava's bucket begins when it is made, not with its first call
	for i, step := range g.trace.Steps {
		switch step.Op {
		case "advance":
			g.clock.Advance(time.Duration(step.Micros) * time.Microsecond)
		case "setRate":
			g.setRate(step.PermitsPerSecond)
		default:
			if !g.reserve(i, step) {
				return
			}
		}
		require.Equal(g, step.NowMicros, g.clock.Now().UnixMicro())
		g.compare(i, step)
	}
}

// setRate changes the rate as Guava does. This library does not let SetRate shrink a bucket below one permit; Guava
// does, so where that happens the configuration is changed instead.
func (g *guavaReplay) setRate(rate float64) {
	small := g.trace.Kind == "bursty" && g.trace.Initial.MaxPermits >= 1 && g.trace.MaxBurstSeconds*rate < 1
	if !small && g.version == 0 {
		require.NoError(g, g.limiter.SetRate(ctx, rate))
		return
	}
	state, err := g.limiter.State(ctx)
	require.NoError(g, err)
	g.version = state.Version + 1
	g.configure(rate)
	_, err = g.limiter.State(ctx) // which brings the new version into force
	require.NoError(g, err)
}

func (g *guavaReplay) reserve(i int, step guavaStep) (goesOn bool) {
	timeout := time.Duration(math.MaxInt64)
	if step.Op == "tryAcquire" && step.TimeoutMicros < math.MaxInt64/1000 {
		timeout = time.Duration(max(0, step.TimeoutMicros)) * time.Microsecond
	}
	r, err := g.limiter.TryReserve(ctx, step.Permits, timeout)
	if float64(step.Permits)*step.State.StableIntervalMicros > 1<<53 {
		require.ErrorIs(g, err, tb.ErrInvalidPermits) // where Guava's arithmetic saturates, this library refuses
		return false
	}
	require.NoError(g, err)
	slack := time.Duration(g.tolerance()) * time.Microsecond
	switch granted := step.Op != "tryAcquire" || step.OK; {
	case granted && !r.OK(): // our wait may be longer by the tolerance, and then so must the timeout
		require.LessOrEqual(g, r.RetryAfter(), slack, "step %d: %+v", i, step)
		r, err = g.limiter.TryReserve(ctx, step.Permits, timeout+slack)
		require.NoError(g, err)
		require.True(g, r.OK(), "step %d: %+v", i, step)
	case !granted && r.OK():
		require.GreaterOrEqual(g, r.Delay(), timeout-slack, "step %d: %+v", i, step)
		require.NoError(g, r.Cancel(ctx))
		return true
	case !granted:
		return true
	}
	g.reservations++
	wait := time.Duration(step.WaitMicros) * time.Microsecond
	require.InDelta(g, wait.Microseconds(), r.Delay().Microseconds(), g.tolerance(), "step %d: %+v", i, step)
	if step.Op != "reserve" {
		g.clock.Advance(wait)
	}
	return true
}

// tolerance in microseconds. Where every cost is a whole number of microseconds, they agree exactly.
func (g *guavaReplay) tolerance() float64 {
	if g.trace.Kind == "warmup" {
		return 10 * float64(3*g.reservations+1)
	}
	if g.trace.whole() {
		return 0
	}
	return float64(3*g.reservations + 1)
}

func (g *guavaReplay) compare(i int, step guavaStep) {
	b, err := g.limiter.State(ctx)
	require.NoError(g, err)
	// State is resynced, what Guava recorded is not: bring it to now as well.
	w := tb.PermitBucket{
		MaxPermits: step.State.MaxPermits, StoredPermits: step.State.StoredPermits, IntervalMicros: step.State.StableIntervalMicros,
		NextFreeTicketMicros: step.State.NextFreeTicketMicros, WarmupMicros: b.WarmupMicros,
	}
	w.ReSync(step.NowMicros)
	coolDown := w.IntervalMicros
	if g.trace.Kind == "warmup" {
		coolDown = float64(g.trace.WarmupMicros) / w.MaxPermits
	}
	require.InEpsilon(g, w.MaxPermits+1, b.MaxPermits+1, 1e-9, "step %d: %+v", i, step)
	require.InEpsilon(g, w.IntervalMicros, b.IntervalMicros, 1e-9, "step %d: %+v", i, step)
	require.InDelta(g, w.NextFreeTicketMicros, b.NextFreeTicketMicros, g.tolerance(), "step %d: %+v", i, step)
	require.InDelta(g, w.StoredPermits, b.StoredPermits, g.tolerance()/coolDown+1e-9*(1+w.MaxPermits), "step %d: %+v", i, step)
}

package faultlab

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// fake is a testing.TB that notes whether it failed.
type fake struct {
	testing.TB
	failed bool
}

func (f *fake) Helper()               {}
func (f *fake) Logf(string, ...any)   {}
func (f *fake) Error(...any)          { f.failed = true }
func (f *fake) Errorf(string, ...any) { f.failed = true }
func (f *fake) Fatalf(string, ...any) { f.failed = true }

func TestWorstAgainstAllWindows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var events []Event
		at := int64(0)
		for range rapid.IntRange(0, 30).Draw(t, "events") {
			at += rapid.SampledFrom([]int64{0, 1, 1000, 199_999, 200_000, 1_000_000}).Draw(t, "gap")
			events = append(events, Event{at, rapid.IntRange(1, 7).Draw(t, "permits")})
		}
		rate := rapid.SampledFrom([]float64{0.1, 1, 5, 5.01, 1000}).Draw(t, "rate")
		most := 0.0
		for i := range events {
			permits := 0
			for j := i; j < len(events); j++ {
				permits += events[j].Permits
				most = max(most, float64(permits)-rate*float64(events[j].At-events[i].At)/1e6)
			}
		}
		mixed := rapid.Permutation(events).Draw(t, "order")
		before := slices.Clone(mixed)
		require.InDelta(t, most, Worst(mixed, rate), Noise(rate))
		require.Equal(t, before, mixed, "the caller's events are left alone")
	})
}

// Under a rate that changes, too, no window is fuller than all windows tried one by one.
func TestWorstByAgainstAllWindows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const change = 1_500_000
		before, after := rapid.Float64Range(0.1, 10).Draw(t, "before"), rapid.Float64Range(0.1, 10).Draw(t, "after")
		allowed := func(from, to int64) float64 {
			return (before*float64(max(0, min(to, change)-from)) + after*float64(max(0, to-max(from, change)))) / 1e6
		}
		var events []Event
		at := int64(0)
		for range rapid.IntRange(0, 30).Draw(t, "events") {
			at += rapid.SampledFrom([]int64{0, 1, 1000, 200_000, 1_000_000}).Draw(t, "gap")
			events = append(events, Event{at, rapid.IntRange(1, 7).Draw(t, "permits")})
		}
		most := 0.0
		for i := range events {
			permits := 0
			for j := i; j < len(events); j++ {
				permits += events[j].Permits
				most = max(most, float64(permits)-allowed(events[i].At, events[j].At))
			}
		}
		require.InDelta(t, most, WorstBy(events, allowed), 1e-6)
	})
}

func TestJudgesAgainstAllSpans(t *testing.T) {
	random := Seed(t)
	for range 300 {
		var all []Span
		for range random.IntN(30) {
			from := random.Int64N(20) * 50_000
			all = append(all, Span{from, from + random.Int64N(6)*40_000})
		}
		rate := []float64{1, 5, 20}[random.IntN(3)]
		want, full, there := 0.0, 0, 0
		const window = 200_000
		for _, a := range all {
			n, now := 0, 0
			for _, b := range all {
				count := 0
				for _, c := range all {
					if c.From >= a.From && c.To <= b.To {
						count++
					}
				}
				if count > 0 {
					want = max(want, float64(count)-rate*float64(b.To-a.From)/1e6)
				}
				if b.From >= a.From && b.To < a.From+window {
					n++
				}
				if b.From <= a.From && b.To > a.From {
					now++
				}
			}
			full, there = max(full, n), max(there, now)
		}
		require.InDelta(t, want, Surely(all, rate), 1e-9, all)
		require.Equal(t, full, Fullest(all, window))
		require.Equal(t, there, Crowd(all))
		var exact []Span
		var events []Event
		for _, l := range all {
			exact = append(exact, Span{l.To, l.To})
			events = append(events, Event{At: l.To, Permits: 1})
		}
		require.InDelta(t, Worst(events, rate), Surely(exact, rate), 1e-9, "the usual measure, if nothing is uncertain")
	}
}

func TestOvertakenAgainstAllPairs(t *testing.T) {
	var fair, unfair int
	rapid.Check(t, func(t *rapid.T) {
		small := rapid.Int64Range(0, 12)
		turns := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Turn {
			joined := small.Draw(t, "joined")
			return Turn{joined, joined + small.Draw(t, "stayed")}
		}), 0, 8).Draw(t, "turns")
		slack := rapid.Int64Range(0, 4).Draw(t, "slack")
		overtakes := func(a, b Turn) bool { return a.Joined < b.Joined-slack && b.Left < a.Left-slack }
		any := false
		for _, a := range turns {
			for _, b := range turns {
				any = any || overtakes(a, b)
			}
		}
		first, second, found := Overtaken(turns, time.Duration(slack)*time.Microsecond)
		require.Equal(t, any, found)
		f := &fake{TB: nil}
		FIFO(f, turns, time.Duration(slack)*time.Microsecond)
		require.Equal(t, found, f.failed)
		if found {
			unfair++
			require.True(t, overtakes(first, second))
			require.Contains(t, turns, first)
			require.Contains(t, turns, second)
		} else {
			fair++
		}
	})
	require.Greater(t, fair, 10)
	require.Greater(t, unfair, 10)
}

func TestSeedIsReplayed(t *testing.T) {
	t.Setenv("TOKENBUCKET_SEED", "42")
	a, b := Seed(t), Seed(t)
	require.Equal(t, a.Uint64(), b.Uint64())
	t.Setenv("TOKENBUCKET_SEED", "43")
	require.NotEqual(t, a.Uint64(), Seed(t).Uint64())
	t.Setenv("TOKENBUCKET_SEED", "x")
	f := &fake{}
	Seed(f)
	require.True(t, f.failed)
}

func TestLasting(t *testing.T) {
	t.Setenv("TOKENBUCKET_LONG", "")
	require.Equal(t, time.Second, Lasting(time.Second, time.Minute))
	t.Setenv("TOKENBUCKET_LONG", "1")
	require.Equal(t, time.Minute, Lasting(time.Second, time.Minute))
}

func TestBit(t *testing.T) {
	for _, c := range []struct {
		before, during int
		bit            bool
	}{{20, 1, true}, {19, 1, false}, {20, 0, false}, {0, 0, false}} {
		f := &fake{}
		Bit(f, c.before, c.during)
		require.Equal(t, !c.bit, f.failed, c)
	}
}

func TestLateness(t *testing.T) {
	l := MeasureLateness(t)
	require.NoError(t, redistest.Poll(5*time.Second, func() error {
		if l.Most() == 0 {
			return context.DeadlineExceeded
		}
		return nil
	}))
	l.Stop()
	most := l.Most()
	time.Sleep(10 * time.Millisecond)
	require.Equal(t, most, l.Most())
	require.GreaterOrEqual(t, l.Since(time.Now()), 5*time.Millisecond, "nobody is woken any more")

	now := time.Now()
	l = &Lateness{due: now.Add(-time.Hour)}
	require.GreaterOrEqual(t, l.Most(), time.Hour, "somebody is still to be woken")
	l = &Lateness{due: now.Add(time.Hour)}
	require.Zero(t, l.Most())
	for _, late := range []time.Duration{70, 90, 80} {
		now = now.Add(time.Second)
		l.lates = append(l.lates, awakening{now.Add(-late), now})
	}
	require.EqualValues(t, 90, l.Since(now.Add(-2*time.Second)))
	require.EqualValues(t, 80, l.Since(now))
	require.Zero(t, l.Since(now.Add(1)))
}

// A server that is not given time is seen in its answers, and in nothing else.
func TestTrips(t *testing.T) {
	server := redistest.Start(t)
	trips := MeasureTrips(t, server.Addr)
	require.NoError(t, server.Stop())
	time.Sleep(200 * time.Millisecond)
	require.NoError(t, server.Continue())
	Soon(t, 20*time.Second, func() bool { return trips.Most() >= 150*time.Millisecond })
	trips.Stop()
	require.GreaterOrEqual(t, trips.Stalls(50*time.Millisecond, 0, Micros()), 150*time.Millisecond)
}

func TestCleanUp(t *testing.T) {
	server := redistest.Start(t)
	client := server.Client(t)
	left := func(prefix string) error { return clean(background, client, prefix) }
	set := func(key string, ttl time.Duration) {
		require.NoError(t, client.Set(background, key, "", ttl).Err())
	}
	set("other:{b}:lock", time.Minute)
	set("a*:{b}", time.Minute)
	set("a*:{b}:lock", time.Minute)
	assert.ErrorContains(t, left("a*:"), "lock")
	require.NoError(t, client.PExpire(background, "a*:{b}:lock", 100*time.Millisecond).Err())
	CleanUp(t, client, "a*:") // waits for it
	set("ab:{b}", 0)
	assert.NoError(t, left("a*:"), "the prefix is no pattern")
	assert.ErrorContains(t, left("ab:"), "for ever")
	require.NoError(t, client.Del(background, "ab:{b}").Err())
	CleanUp(t, client, "ab:")
}

func TestCleanUpOfACluster(t *testing.T) {
	client := redistest.StartCluster(t).Client(t)
	for _, key := range []string{"a:1:lock", "a:2", "a:3", "a:4", "a:5", "a:6"} { // on all masters
		require.NoError(t, client.Set(background, key, "", time.Minute).Err())
	}
	var found int
	require.NoError(t, client.ForEachMaster(background, func(ctx context.Context, c *redis.Client) error {
		if clean(ctx, c, "a:") != nil {
			found++
		}
		return nil
	}))
	require.Equal(t, 1, found)
	require.NoError(t, client.Del(background, "a:1:lock").Err())
	CleanUp(t, client, "a:")
}

// Stalls that a time cuts off count as far as they lie in it, and short ones not at all.
func TestStalls(t *testing.T) {
	at := func(ms int) time.Time { return origin.Add(time.Duration(ms) * time.Millisecond) }
	l := &Lateness{lates: []awakening{{at(0), at(60)}, {at(100), at(149)}, {at(200), at(300)}, {at(400), at(700)}, {at(900), at(990)}}}
	require.Equal(t, 170*time.Millisecond, l.Stalls(50*time.Millisecond, micros(at(50)), micros(at(460))))
	require.Zero(t, l.Stalls(50*time.Millisecond, micros(at(800)), micros(at(900))))
}

// Package fleettest simulates a fleet for the console's tests, without Redis and without calls.
package fleettest

import (
	"context"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// Fleet is a console.Source. Its methods may be called concurrently.
type Fleet struct {
	mu        sync.Mutex
	began     time.Time
	limits    []Limit
	instances int
	err       error
	events    []fleet.Event
	asked     int
	adjust    func(*fleet.Instance)

	semaphores []fleet.Semaphore
	windows    []fleet.Window
}

// Limit describes the simulated calls of a limit. Rates are per second, summed over all instances.
type Limit struct {
	Name             string
	Rate             float64
	Granted, Refused float64
	Waiting          int
	Shadow, Quota    bool
	Warmup           time.Duration
	Held             time.Duration // held back for this long since the start
	Decider          string
	Rejected         *fleet.Rejected
	Keys             []string // keys that are refused
}

// New returns a fleet with a number of instances.
func New(instances int, limits ...Limit) *Fleet {
	return &Fleet{began: time.Now(), limits: limits, instances: instances}
}

// Many returns n limits of all kinds.
func Many(n int) []Limit {
	all := make([]Limit, n)
	for i := range all {
		all[i] = Limit{Name: fmt.Sprintf("/service-%d/call-%05d", i%17, i), Rate: float64(1 + i%50), Granted: float64(i % 23), Refused: float64(max(0, i%31-25))}
	}
	return all
}

// Set changes the limits.
func (f *Fleet) Set(limits ...Limit) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.limits = limits
}

// Adjust sets a function that changes each instance of a snapshot; nil removes it.
func (f *Fleet) Adjust(adjust func(*fleet.Instance)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.adjust = adjust
}

// Fail makes every method return an error; nil ends that.
func (f *Fleet) Fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.err = err
}

// Happen adds an event.
func (f *Fleet) Happen(e fleet.Event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.events = append(f.events, e)
}

// Asked returns the number of calls of Snapshot.
func (f *Fleet) Asked() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.asked
}

// Snapshot implements console.Source.
func (f *Fleet) Snapshot(context.Context) (*fleet.Snapshot, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked++
	if f.err != nil {
		return nil, f.err
	}
	now := time.Now()
	s := &fleet.Snapshot{At: now}
	for i := range f.instances {
		one := f.instance(i, now)
		if f.adjust != nil {
			f.adjust(&one)
		}
		s.Instances = append(s.Instances, one)
	}
	return s, nil
}

func (f *Fleet) instance(i int, now time.Time) fleet.Instance {
	age := now.Sub(f.began).Seconds() + 3600
	one := fleet.Instance{
		ID: fmt.Sprintf("i-%d", i), Beat: now, Beats: int64(age / 2), Limits: map[string]*fleet.Limit{},
		Info: fleet.Info{
			Host: fmt.Sprintf("gateway-%d", i+1), PID: 100 + i, Version: "v1.2.3", Started: f.began.Add(-time.Hour),
			Loads:      fleet.Loads{Tried: int(age / 5), Last: now.Add(-time.Second), Limits: len(f.limits)},
			Store:      fleet.Store{Kind: "script", Policy: "closed"},
			Semaphores: f.semaphores, Windows: f.windows,
		},
	}
	for n := range f.limits {
		l := &f.limits[n]
		if l.Rejected != nil {
			one.Rejected = append(one.Rejected, *l.Rejected)
			one.Limits[l.Name] = &fleet.Limit{Name: l.Name, Decider: "bad_row"}
			continue
		}
		for _, k := range l.Keys {
			one.Refused = append(one.Refused, fleet.Key{Limit: l.Name, Key: k, Count: int64(l.Refused * age)})
		}
		one.Limits[l.Name] = l.at(age, float64(f.instances), f.began, now)
	}
	return one
}

func (l *Limit) at(age, instances float64, began, now time.Time) *fleet.Limit {
	wave := age + 2*math.Sin(age/5) // a rate that goes up and down
	out := &fleet.Limit{
		Name: l.Name, Decider: "limit",
		Config: fleet.Config{Row: "1", Kind: fleet.Bursty, Rate: l.Rate, Wait: 500 * time.Millisecond, Version: 1, Shadow: l.Shadow},
		Bucket: fleet.Bucket{At: now, Rate: l.Rate, Stored: l.Rate / 2, Max: l.Rate},
	}
	out.Granted = int64(l.Granted * wave / instances)
	out.Waited = out.Granted / 3
	out.WaitSum = time.Duration(out.Waited) * 100 * time.Millisecond
	out.Waits[6] = out.Waited
	if refused := int64(l.Refused * wave / instances); l.Shadow {
		out.WouldRefuse = refused
	} else {
		out.Refused = refused
	}
	switch {
	case l.Quota:
		out.Config.Kind = fleet.Quota
	case l.Warmup > 0:
		out.Config.Kind, out.Config.Warmup = fleet.WarmUp, l.Warmup
		c, _ := out.Config.Curve(l.Rate)
		out.Bucket.Max, out.Bucket.Stored = c.Max, c.Max*0.7
	}
	if l.Decider != "" {
		out.Decider, out.Config.Kind, out.Bucket = l.Decider, fleet.NoLimit, fleet.Bucket{}
	}
	if l.Held > 0 {
		out.Bucket.HeldUntil = began.Add(l.Held)
	}
	if l.Waiting > 0 {
		out.Waiting = fleet.Waiting{Count: l.Waiting, Since: now.Add(-300 * time.Millisecond)}
	}
	return out
}

// History implements console.Source.
func (f *Fleet) History(_ context.Context, name string, from time.Time) ([]fleet.Point, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return nil, f.err
	}
	var all []fleet.Point
	for _, l := range f.limits {
		if l.Name != name {
			continue
		}
		for at := from.Truncate(time.Minute); !at.After(time.Now()); at = at.Add(time.Minute) {
			wave, over := 1+0.5*math.Sin(float64(at.Unix())/9000), min(60, time.Since(at).Seconds())
			granted := over * l.Granted * min(1, wave)
			all = append(all, fleet.Point{
				Minute: at, Published: true, Granted: int64(granted), Refused: int64(over * l.Refused * wave), Waited: int64(granted / 3), Rate: l.Rate,
			})
		}
	}
	return all, nil
}

// Events implements console.Source.
func (f *Fleet) Events(_ context.Context, from time.Time) ([]fleet.Event, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		return nil, f.err
	}
	var all []fleet.Event
	for _, e := range f.events {
		if !e.At.Before(from) {
			all = append(all, e)
		}
	}
	return all, nil
}

// Bucket implements console.Buckets.
func (f *Fleet) Bucket(_ context.Context, name string) (string, [][2]string, error) {
	return "tokenbucket:{" + name + "}", [][2]string{{"v", "1"}, {"stored", "2.5"}, {"next", "1764500000000000"}}, nil
}

// Example returns a fleet with a limit of each kind that the console marks.
func Example() *Fleet {
	now := time.Now()
	f := New(3,
		Limit{Name: "/ibe/AvailFare", Rate: 5, Granted: 5, Refused: 12, Waiting: 3, Keys: []string{"10.0.0.7", "10.0.0.9"}},
		Limit{Name: "/ibe/Book", Rate: 20, Granted: 8, Refused: 0},
		Limit{Name: "/pay/Capture", Rate: 10, Granted: 10, Refused: 1.5, Quota: true},
		Limit{Name: "/cold/Report", Rate: 2, Granted: 1, Refused: 0.3, Warmup: 20 * time.Second},
		Limit{Name: "/trial/Search", Rate: 30, Granted: 30, Refused: 4, Shadow: true},
		Limit{Name: "/held/Upstream", Rate: 10, Granted: 0, Refused: 6, Held: time.Hour},
		Limit{Name: "/quiet/Nightly", Rate: 1},
		Limit{Name: "/stopped/Old", Rate: 0, Refused: 0.5, Decider: "zero"},
		Limit{Name: "/bad/Row", Rejected: &fleet.Rejected{Row: "17", Name: "/bad/Row", Field: "rate", Value: "-3", Want: "a number of permits per second", Consequence: "calls are refused"}},
		Limit{Name: `<img src=x onerror="alert(1)">'"&amp;`, Rate: 3, Granted: 1, Refused: 2.2},
	)
	f.semaphores = []fleet.Semaphore{
		{Name: "/ibe/AvailFare", Permits: 200, Used: 200, Waiting: 12, Holders: []fleet.Holder{
			{Fence: 41, Label: "gateway-1", Permits: 120, Since: now.Add(-90 * time.Second), Expires: now.Add(time.Hour)},
			{Fence: 57, Label: "gateway-2", Permits: 80, Since: now.Add(-4 * time.Second), Expires: now.Add(time.Hour)},
		}},
		{Name: "exports", Permits: 3},
	}
	f.windows = []fleet.Window{{Name: "/pay/Capture", Limit: 10_000, Used: 8_312, Length: 24 * time.Hour}, {Name: "letters", Limit: 100, Used: 12, Length: time.Minute}}
	f.Happen(fleet.Event{At: now.Add(-5 * time.Hour), Kind: fleet.LimitChanged, Limit: "/ibe/AvailFare", From: "8/s, saves up 8, waits up to 500 ms", To: "5/s, saves up 5, waits up to 500 ms"})
	f.Happen(fleet.Event{At: now.Add(-8 * time.Minute), Kind: fleet.Penalized, Limit: "/ibe/AvailFare", For: 30 * time.Second})
	f.Happen(fleet.Event{At: now.Add(-2 * time.Hour), Kind: fleet.StoreDown, Host: "gateway-2", Err: "connection refused"})
	return f
}

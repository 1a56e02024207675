// Package telemetrytest is the conformance suite of the adapters for Prometheus and OpenTelemetry: the same events give the same figures in
// both libraries.
package telemetrytest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// Adapter is the adapter under test, with a registry or provider of its own. O is the type of its options.
type Adapter[O any] struct {
	Limiter       func(...O) (tokenbucket.Observer, error)
	SlidingWindow func(...O) (slidingwindow.Observer, error)
	Semaphore     func(...O) (semaphore.Observer, error)

	WithBuckets    func(func(name string) string) O
	WithMaxBuckets func(int) O

	// Collect returns all series as Prometheus names them, in the form name{label="value",…} with labels in order of name. Histograms have
	// _count, _sum, and _bucket with its le. Of a library that names them differently, it translates the names.
	Collect func(testing.TB) Series
}

// Series are values of series by name and labels.
type Series map[string]float64

// Of returns the series that begin with one of the prefixes, without those that are 0: not every library has series before their first event.
func (s Series) Of(prefixes ...string) Series {
	kept := Series{}
	for key, value := range s {
		for _, p := range prefixes {
			if strings.HasPrefix(key, p) && value != 0 {
				kept[key] = value
			}
		}
	}
	return kept
}

// Sum returns the sum of all values.
func (s Series) Sum() (total float64) {
	for _, v := range s {
		total += v
	}
	return total
}

// outcomes returns the sums of a metric by outcome.
func (s Series) outcomes(metric string) map[string]float64 {
	total := map[string]float64{}
	for key, v := range s.Of(metric + "{") {
		_, rest, _ := strings.Cut(key, `outcome="`)
		outcome, _, _ := strings.Cut(rest, `"`)
		total[outcome] += v
	}
	return total
}

// labelValues returns the values of a label.
func (s Series) labelValues(label string) map[string]bool {
	values := map[string]bool{}
	for key := range s {
		for _, before := range []string{"{", ","} {
			if _, rest, ok := strings.Cut(key, before+label+`="`); ok {
				value, _, _ := strings.Cut(rest, `"`)
				values[value] = true
			}
		}
	}
	return values
}

// Run runs the suite. open returns an adapter whose registry or provider is empty.
func Run[O any](t *testing.T, open func(testing.TB) Adapter[O]) {
	s := suite[O]{open}
	for _, test := range []struct {
		name string
		run  func(*testing.T)
	}{
		{"Events", s.events},
		{"Health", s.health},
		{"Kinds", s.kinds},
		{"MaxBuckets", s.maxBuckets},
		{"WithBuckets", s.withBuckets},
		{"KeysOfRows", s.keysOfRows},
		{"InvalidOptions", s.invalidOptions},
		{"Allocations", s.allocations},
		{"Packages", s.packages},
		{"PackagesBounded", s.packagesBounded},
		{"StoreUpAgain", s.storeUpAgain},
		{"MemoryLimiter", s.memoryLimiter},
		{"Waits", s.waits},
		{"RedisLimiter", s.redisLimiter},
		{"RedisOutage", s.redisOutage},
		{"RedisWindow", s.redisWindow},
		{"RedisSemaphore", s.redisSemaphore},
	} {
		t.Run(test.name, test.run)
	}
}

type suite[O any] struct{ open func(testing.TB) Adapter[O] }

// limiter opens an adapter and returns its observer of limiters.
func (s suite[O]) limiter(t testing.TB, opts ...O) (Adapter[O], tokenbucket.Observer) {
	t.Helper()
	a := s.open(t)
	observer, err := a.Limiter(opts...)
	require.NoError(t, err)
	return a, observer
}

// packageObservers opens an adapter and returns its observers of sliding windows and semaphores.
func (s suite[O]) packageObservers(t testing.TB, opts ...func(Adapter[O]) O) (Adapter[O], slidingwindow.Observer, semaphore.Observer) {
	t.Helper()
	a := s.open(t)
	var options []O
	for _, opt := range opts {
		options = append(options, opt(a))
	}
	window, err := a.SlidingWindow(options...)
	require.NoError(t, err)
	sem, err := a.Semaphore(options...)
	require.NoError(t, err)
	return a, window, sem
}

// requireSeries fails unless every wanted series has its value.
func requireSeries(t testing.TB, want, got Series) {
	t.Helper()
	for key, value := range want {
		require.InDelta(t, value, got[key], 1e-9, key)
	}
}

// events reports every kind of event once and checks every figure.
func (s suite[O]) events(t *testing.T) {
	a, observer := s.limiter(t)
	Report(observer)
	got := a.Collect(t)
	require.Equal(t, Series{
		`tokenbucket_decisions_total{bucket="fares",by="store",outcome="granted",shadow="false"}`:                       2,
		`tokenbucket_decisions_total{bucket="fares",by="prefetch",outcome="granted",shadow="false"}`:                    1,
		`tokenbucket_decisions_total{bucket="fares",by="store",outcome="refused",shadow="false"}`:                       1,
		`tokenbucket_decisions_total{bucket="fares",by="snapshot",outcome="refused",shadow="false"}`:                    2,
		`tokenbucket_decisions_total{bucket="fares",by="snapshot",outcome="refused",shadow="true"}`:                     1,
		`tokenbucket_decisions_total{bucket="fares",by="store",outcome="granted",shadow="true"}`:                        1,
		`tokenbucket_decisions_total{bucket="fares",by="switch",outcome="granted",shadow="false"}`:                      1,
		`tokenbucket_decisions_total{bucket="fares",by="policy",outcome="granted",shadow="false"}`:                      1,
		`tokenbucket_decisions_total{bucket="fares",by="policy",outcome="failed",shadow="false"}`:                       1,
		`tokenbucket_decisions_total{bucket="fares",by="store",outcome="failed",shadow="false"}`:                        2,
		`tokenbucket_decisions_total{bucket="fares",by="check",outcome="failed",shadow="false"}`:                        2,
		`tokenbucket_decisions_total{bucket="hotels",by="unknown",outcome="granted",shadow="false"}`:                    1,
		`tokenbucket_decisions_total{bucket="hotels",by="store",outcome="granted",priority="low",shadow="false"}`:       1,
		`tokenbucket_decisions_total{bucket="hotels",by="priority",outcome="refused",priority="lowest",shadow="false"}`: 1,
	}, got.Of("tokenbucket_decisions_total"))
	require.Equal(t, Series{
		`tokenbucket_permits_total{bucket="fares",by="store",outcome="granted",shadow="false"}`:                       3,
		`tokenbucket_permits_total{bucket="fares",by="prefetch",outcome="granted",shadow="false"}`:                    1,
		`tokenbucket_permits_total{bucket="fares",by="store",outcome="refused",shadow="false"}`:                       3,
		`tokenbucket_permits_total{bucket="fares",by="snapshot",outcome="refused",shadow="false"}`:                    2,
		`tokenbucket_permits_total{bucket="fares",by="snapshot",outcome="refused",shadow="true"}`:                     1,
		`tokenbucket_permits_total{bucket="fares",by="store",outcome="granted",shadow="true"}`:                        1,
		`tokenbucket_permits_total{bucket="fares",by="switch",outcome="granted",shadow="false"}`:                      1,
		`tokenbucket_permits_total{bucket="fares",by="policy",outcome="granted",shadow="false"}`:                      1,
		`tokenbucket_permits_total{bucket="fares",by="policy",outcome="failed",shadow="false"}`:                       1,
		`tokenbucket_permits_total{bucket="fares",by="store",outcome="failed",shadow="false"}`:                        5,
		`tokenbucket_permits_total{bucket="hotels",by="unknown",outcome="granted",shadow="false"}`:                    1,
		`tokenbucket_permits_total{bucket="hotels",by="store",outcome="granted",priority="low",shadow="false"}`:       1,
		`tokenbucket_permits_total{bucket="hotels",by="priority",outcome="refused",priority="lowest",shadow="false"}`: 1,
	}, got.Of("tokenbucket_permits_total"))
	require.Equal(t, Series{
		`tokenbucket_failures_total{bucket="fares",kind="unavailable",shadow="false"}`: 1,
		`tokenbucket_failures_total{bucket="fares",kind="timeout",shadow="false"}`:     1,
		`tokenbucket_failures_total{bucket="fares",kind="canceled",shadow="false"}`:    1,
		`tokenbucket_failures_total{bucket="fares",kind="invalid",shadow="false"}`:     2,
		`tokenbucket_lease_permits_total{bucket="fares",use="used"}`:                   12,
		`tokenbucket_lease_permits_total{bucket="fares",use="unused"}`:                 3,
		`tokenbucket_lost_permits_total{bucket="fares"}`:                               4,
		`tokenbucket_store_errors_total{kind="timeout"}`:                               1,
		`tokenbucket_store_up{}`:                 1,
		`tokenbucket_store_outages_total{}`:      1,
		`tokenbucket_store_away_seconds_total{}`: 1.5,
	}, got.Of("tokenbucket_failures", "tokenbucket_lease", "tokenbucket_lost", "tokenbucket_store_errors", "tokenbucket_store_up", "tokenbucket_store_outages",
		"tokenbucket_store_away", "tokenbucket_policy"))

	// Bucket fares has one wait of 200 ms and four of 0, hotels one of 0, and one of a lower priority in a series of its own. The minute in shadow has a series of its own.
	requireSeries(t, Series{
		`tokenbucket_wait_duration_seconds_count{bucket="fares",shadow="false"}`:                 5,
		`tokenbucket_wait_duration_seconds_sum{bucket="fares",shadow="false"}`:                   0.2,
		`tokenbucket_wait_duration_seconds_bucket{bucket="fares",le="0.001",shadow="false"}`:     4,
		`tokenbucket_wait_duration_seconds_bucket{bucket="fares",le="0.1",shadow="false"}`:       4,
		`tokenbucket_wait_duration_seconds_bucket{bucket="fares",le="0.25",shadow="false"}`:      5,
		`tokenbucket_wait_duration_seconds_count{bucket="fares",shadow="true"}`:                  1,
		`tokenbucket_wait_duration_seconds_bucket{bucket="fares",le="30",shadow="true"}`:         0,
		`tokenbucket_wait_duration_seconds_bucket{bucket="fares",le="60",shadow="true"}`:         1,
		`tokenbucket_wait_duration_seconds_count{bucket="hotels",shadow="false"}`:                1,
		`tokenbucket_wait_duration_seconds_count{bucket="hotels",priority="low",shadow="false"}`: 1,
		`tokenbucket_store_trip_duration_seconds_count{result="answered"}`:                       2,
		`tokenbucket_store_trip_duration_seconds_sum{result="answered"}`:                         0.0005,
		`tokenbucket_store_trip_duration_seconds_bucket{le="0.00025",result="answered"}`:         1,
		`tokenbucket_store_trip_duration_seconds_count{result="failed"}`:                         1,
		`tokenbucket_store_trip_duration_seconds_bucket{le="0.5",result="failed"}`:               0,
		`tokenbucket_store_trip_duration_seconds_bucket{le="1",result="failed"}`:                 1,
		`tokenbucket_batch_requests_count{}`:                                                     3,
		`tokenbucket_batch_requests_sum{}`:                                                       64,
		`tokenbucket_batch_requests_bucket{le="4"}`:                                              2,
		`tokenbucket_lock_wait_duration_seconds_count{}`:                                         1,
		`tokenbucket_lock_wait_duration_seconds_sum{}`:                                           0.02,
	}, got)
}

// health checks that the store is up at first, that the latest report of any limiter decides, and that policies are in force only during an
// outage.
func (s suite[O]) health(t *testing.T) {
	a, observer := s.limiter(t)
	state := func(up, outages, away, closed, open, share float64) {
		t.Helper()
		requireSeries(t, Series{
			`tokenbucket_store_up{}`: up, `tokenbucket_store_outages_total{}`: outages, `tokenbucket_store_away_seconds_total{}`: away,
			`tokenbucket_policy_in_force{policy="FailClosed"}`: closed, `tokenbucket_policy_in_force{policy="FailOpen"}`: open,
			`tokenbucket_policy_in_force{policy="LocalShare"}`: share,
		}, a.Collect(t))
	}
	state(1, 0, 0, 0, 0, 0)
	down := tokenbucket.Health{Bucket: "fares", Down: true, Policy: tokenbucket.FailOpen, Err: ErrOther}
	observer.Health(down)
	state(0, 1, 0, 0, 1, 0)
	down.Bucket, down.Policy = "hotels", tokenbucket.LocalShare(4)
	observer.Health(down) // the same outage, reported by another limiter
	state(0, 1, 0, 0, 1, 1)
	observer.Health(tokenbucket.Health{Bucket: "rooms", After: 1500 * time.Millisecond})
	state(1, 1, 1.5, 0, 0, 0)
	observer.Health(tokenbucket.Health{Bucket: "hotels", After: 1600 * time.Millisecond}) // reported already
	state(1, 1, 1.5, 0, 0, 0)
	down.Policy = tokenbucket.FailClosed
	observer.Health(down)
	state(0, 2, 1.5, 1, 0, 0)
}

// kinds checks that failed calls and failed batches are counted by kind. Which error has which kind is tested in package telemetry.
func (s suite[O]) kinds(t *testing.T) {
	for _, c := range []struct {
		err         error
		call, batch string
	}{
		{Wrap(tokenbucket.ErrStoreTimeout), "timeout", "timeout"},
		{Wrap(tokenbucket.ErrCorruptState), "corrupt", "corrupt"},
		{context.DeadlineExceeded, "deadline", "timeout"},
		{ErrOther, "other", "other"},
	} {
		a, observer := s.limiter(t)
		observer.Decision(t.Context(), tokenbucket.Decision{Bucket: "fares", Permits: 1, Err: c.err})
		observer.Trip(tokenbucket.Trip{Bucket: "fares", Requests: 1, Err: c.err})
		require.Equal(t, Series{
			fmt.Sprintf(`tokenbucket_failures_total{bucket="fares",kind=%q,shadow="false"}`, c.call): 1,
			fmt.Sprintf(`tokenbucket_store_errors_total{kind=%q}`, c.batch):                          1,
		}, a.Collect(t).Of("tokenbucket_failures", "tokenbucket_store_errors"), "%v", c.err)
	}
}

// maxBuckets checks that no series exceed the bound and no count is lost, with concurrent events and collections.
func (s suite[O]) maxBuckets(t *testing.T) {
	const most, names, goroutines = 10, 500, 8
	a := s.open(t)
	observer, err := a.Limiter(a.WithMaxBuckets(most))
	require.NoError(t, err)
	var running sync.WaitGroup
	for range goroutines {
		running.Go(func() {
			for i := range names {
				name := fmt.Sprint("client-", i)
				observer.Decision(context.Background(), tokenbucket.Decision{Bucket: name, Permits: 2, Granted: true})
				observer.Decision(context.Background(), tokenbucket.Decision{Bucket: name, Permits: 1, Err: ErrOther})
				observer.Prefetch(name, 3, 1)
				observer.Lost(name, 5)
				observer.Trip(tokenbucket.Trip{Bucket: name, Requests: 1})
				observer.Health(tokenbucket.Health{Bucket: name, Down: i%2 == 0})
			}
		})
	}
	for range 5 {
		a.Collect(t)
	}
	running.Wait()
	got := a.Collect(t)
	for metric, each := range map[string]float64{
		"decisions_total": 2, "permits_total": 3, "failures_total": 1, "lease_permits_total": 3, "lost_permits_total": 5, "wait_duration_seconds_count": 1,
	} {
		assert.Equal(t, each*names*goroutines, got.Of("tokenbucket_"+metric+"{").Sum(), metric)
	}
	granted := got.Of("tokenbucket_wait_duration_seconds_count{")
	require.Len(t, granted, most+1)
	require.Equal(t, float64((names-most)*goroutines), granted[`tokenbucket_wait_duration_seconds_count{bucket="other",shadow="false"}`])
}

// withBuckets checks that names become label values by the function, that "" leaves the label out, and that invalid UTF-8 is replaced.
func (s suite[O]) withBuckets(t *testing.T) {
	a := s.open(t)
	observer, err := a.Limiter(a.WithBuckets(func(name string) string {
		tenant, _, _ := strings.Cut(name, "/")
		return tenant
	}))
	require.NoError(t, err)
	for _, name := range []string{"a/1", "a/2", "b/1", "/3", "\xff/4"} {
		observer.Decision(t.Context(), tokenbucket.Decision{Bucket: name, Permits: 1})
	}
	require.Equal(t, Series{
		`tokenbucket_decisions_total{bucket="a",by="store",outcome="refused",shadow="false"}`:              2,
		`tokenbucket_decisions_total{bucket="b",by="store",outcome="refused",shadow="false"}`:              1,
		`tokenbucket_decisions_total{by="store",outcome="refused",shadow="false"}`:                         1,
		"tokenbucket_decisions_total{bucket=\"\uFFFD\",by=\"store\",outcome=\"refused\",shadow=\"false\"}": 1,
	}, a.Collect(t).Of("tokenbucket_decisions_total"))
}

// keysOfRows checks that a registry's keys are counted by row, so that callers cannot create series, and by key on demand. A bucket whose
// name is that of the shared value is not counted with it.
func (s suite[O]) keysOfRows(t *testing.T) {
	count := func(opts ...func(Adapter[O]) O) Series {
		a := s.open(t)
		var options []O
		for _, opt := range opts {
			options = append(options, opt(a))
		}
		observer, err := a.Limiter(options...)
		require.NoError(t, err)
		limits, err := registry.New(registry.Static{{Name: "/a/*", Rate: 5, PerKey: true}, {Name: "other", Rate: 5}, {Name: "/b", Rate: 5}},
			tokenbucket.NewMemoryStore(), registry.WithLimiterOptions(tokenbucket.WithObserver(observer)))
		require.NoError(t, err)
		defer limits.Close()
		for i := range 1000 {
			_, err := limits.Enter(t.Context(), fmt.Sprint("/a/", i))
			require.NoError(t, err)
		}
		for _, name := range []string{"other", "/b"} {
			_, err = limits.Enter(t.Context(), name)
			require.NoError(t, err)
		}
		return a.Collect(t)
	}
	got := count()
	require.Equal(t, Series{
		`tokenbucket_decisions_total{bucket="/a/*",by="store",outcome="granted",shadow="false"}`:      1000,
		`tokenbucket_decisions_total{bucket="\"other\"",by="store",outcome="granted",shadow="false"}`: 1,
		`tokenbucket_decisions_total{bucket="/b",by="store",outcome="granted",shadow="false"}`:        1,
	}, got.Of("tokenbucket_decisions_total"))

	got = count(func(a Adapter[O]) O {
		return a.WithBuckets(func(name string) string { return strings.TrimPrefix(name, "/a/*|") })
	},
		func(a Adapter[O]) O { return a.WithMaxBuckets(10_000) })
	require.Len(t, got.Of("tokenbucket_decisions_total"), 1002)
	require.Contains(t, got.labelValues("bucket"), "999")

	got = count(func(a Adapter[O]) O { return a.WithMaxBuckets(1) })
	require.Equal(t, map[string]bool{"/a/*": true, "other": true}, got.labelValues("bucket"))
}

// invalidOptions checks the constructors' errors.
func (s suite[O]) invalidOptions(t *testing.T) {
	a := s.open(t)
	var none O
	for want, opt := range map[string]O{
		"option nil":        none,
		"buckets nil":       a.WithBuckets(nil),
		"max buckets 0":     a.WithMaxBuckets(0),
		"max buckets 10001": a.WithMaxBuckets(10_001),
	} {
		_, err := a.Limiter(opt)
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
		require.ErrorContains(t, err, want)
		_, err = a.SlidingWindow(opt)
		require.ErrorContains(t, err, want)
		_, err = a.Semaphore(opt)
		require.ErrorContains(t, err, want)
	}
	require.Empty(t, a.Collect(t), "nothing is registered")
}

// allocations checks that frequent events do not allocate, in a bucket with series of its own and in one without.
func (s suite[O]) allocations(t *testing.T) {
	a := s.open(t)
	observer, err := a.Limiter(a.WithMaxBuckets(1))
	require.NoError(t, err)
	ctx := context.Background()
	for _, bucket := range []string{"own", "beyond the bound"} {
		granted := tokenbucket.Decision{Bucket: bucket, Permits: 1, Granted: true}
		refused := tokenbucket.Decision{Bucket: bucket, Permits: 1, By: tokenbucket.BySnapshot}
		trip := tokenbucket.Trip{Bucket: bucket, Requests: 8, Elapsed: 100 * time.Microsecond}
		for name, event := range map[string]func(){
			"granted": func() { observer.Decision(ctx, granted) },
			"refused": func() { observer.Decision(ctx, refused) },
			"trip":    func() { observer.Trip(trip) },
		} {
			assert.Zero(t, testing.AllocsPerRun(100, event), "%s, %s", name, bucket)
		}
	}
}

// packages checks how events of sliding windows and semaphores are counted.
func (s suite[O]) packages(t *testing.T) {
	a, window, sem := s.packageObservers(t)
	ReportPackages(window, sem)
	got := a.Collect(t)
	for key := range got {
		if strings.Contains(key, "_bucket{") {
			delete(got, key)
		}
	}
	require.Equal(t, Series{
		`slidingwindow_decisions_total{by="store",limiter="fares",outcome="granted"}`:    1,
		`slidingwindow_decisions_total{by="policy",limiter="fares",outcome="granted"}`:   1,
		`slidingwindow_decisions_total{by="snapshot",limiter="fares",outcome="refused"}`: 1,
		`slidingwindow_decisions_total{by="store",limiter="fares",outcome="failed"}`:     1,
		`slidingwindow_permits_total{by="store",limiter="fares",outcome="granted"}`:      2,
		`slidingwindow_permits_total{by="policy",limiter="fares",outcome="granted"}`:     1,
		`slidingwindow_permits_total{by="snapshot",limiter="fares",outcome="refused"}`:   1,
		`slidingwindow_permits_total{by="store",limiter="fares",outcome="failed"}`:       1,
		`slidingwindow_failures_total{kind="unavailable",limiter="fares"}`:               1,
		`slidingwindow_wait_duration_seconds_count{limiter="fares"}`:                     1,
		`slidingwindow_wait_duration_seconds_sum{limiter="fares"}`:                       1,
		`slidingwindow_store_trip_duration_seconds_count{result="failed"}`:               1,
		`slidingwindow_store_trip_duration_seconds_sum{result="failed"}`:                 1,
		`slidingwindow_store_errors_total{kind="corrupt"}`:                               1,
		`slidingwindow_batch_requests_count{}`:                                           1,
		`slidingwindow_batch_requests_sum{}`:                                             3,
		`slidingwindow_store_outages_total{}`:                                            1,
		`slidingwindow_store_up{}`:                                                       1,
		`slidingwindow_store_away_seconds_total{}`:                                       2,

		`semaphore_decisions_total{outcome="granted",semaphore="fares"}`:          1,
		`semaphore_decisions_total{outcome="refused",semaphore="fares"}`:          1,
		`semaphore_permits_total{outcome="granted",semaphore="fares"}`:            2,
		`semaphore_permits_total{outcome="refused",semaphore="fares"}`:            2,
		`semaphore_decisions_total{outcome="failed",semaphore="fares"}`:           2,
		`semaphore_permits_total{outcome="failed",semaphore="fares"}`:             4,
		`semaphore_failures_total{kind="timeout",semaphore="fares"}`:              1,
		`semaphore_failures_total{kind="invalid",semaphore="fares"}`:              1,
		`semaphore_wait_duration_seconds_count{semaphore="fares"}`:                1,
		`semaphore_wait_duration_seconds_sum{semaphore="fares"}`:                  1,
		`semaphore_held_duration_seconds_count{end="released",semaphore="fares"}`: 1,
		`semaphore_held_duration_seconds_count{end="expired",semaphore="fares"}`:  1,
		`semaphore_held_duration_seconds_count{end="lost",semaphore="fares"}`:     1,
		`semaphore_held_duration_seconds_count{end="closed",semaphore="fares"}`:   1,
		`semaphore_held_duration_seconds_count{end="other",semaphore="fares"}`:    1,
		`semaphore_held_duration_seconds_sum{end="released",semaphore="fares"}`:   1,
		`semaphore_held_duration_seconds_sum{end="expired",semaphore="fares"}`:    1,
		`semaphore_held_duration_seconds_sum{end="lost",semaphore="fares"}`:       1,
		`semaphore_held_duration_seconds_sum{end="closed",semaphore="fares"}`:     1,
		`semaphore_held_duration_seconds_sum{end="other",semaphore="fares"}`:      1,
		`semaphore_store_trip_duration_seconds_count{result="failed"}`:            1,
		`semaphore_store_trip_duration_seconds_sum{result="failed"}`:              1,
		`semaphore_store_errors_total{kind="timeout"}`:                            1,
		`semaphore_batch_requests_count{}`:                                        1,
		`semaphore_batch_requests_sum{}`:                                          3,
		`semaphore_store_up{}`:                                                    1,
		`semaphore_store_outages_total{}`:                                         1,
		`semaphore_store_away_seconds_total{}`:                                    3,
	}, got.Of(""))
}

// packagesBounded checks that the label values of sliding windows and semaphores are bounded, whatever the names, deciders and errors.
func (s suite[O]) packagesBounded(t *testing.T) {
	a, window, sem := s.packageObservers(t, func(a Adapter[O]) O { return a.WithMaxBuckets(3) })
	ctx := context.Background()
	for i := range 100 {
		name := fmt.Sprintf("name %02d", i)
		window.Decision(ctx, slidingwindow.Decision{Limiter: name, Permits: 1, Err: fmt.Errorf("%d: %w", i, redis.ErrClosed)})
		window.Decision(ctx, slidingwindow.Decision{Limiter: name, Permits: 1, Granted: true, By: slidingwindow.Decider(i), Wait: time.Second})
		sem.Decision(ctx, semaphore.Decision{Semaphore: name, Permits: 1, Granted: true})
		sem.Lease(semaphore.LeaseUse{Semaphore: name, Permits: 1, Held: time.Second, Err: errors.New(name)})
	}
	got := a.Collect(t)
	require.Equal(t, map[string]bool{"name 00": true, "name 01": true, "name 02": true, "other": true}, got.labelValues("limiter"))
	require.Equal(t, map[string]bool{"name 00": true, "name 01": true, "name 02": true, "other": true}, got.labelValues("semaphore"))
	require.Equal(t, 200.0, got.Of("slidingwindow_decisions_total").Sum())
	require.Equal(t, map[string]bool{"store": true, "snapshot": true, "policy": true, "check": true}, got.labelValues("by"))
	require.Equal(t, map[string]bool{"other": true}, got.labelValues("end"))
}

// storeUpAgain checks that the store does not stay down if the limiter or semaphore that noticed an outage is never used again: successful
// batches of others end the outage.
func (s suite[O]) storeUpAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, window, sem := s.packageObservers(t)
		window.Trip(slidingwindow.Trip{Limiter: "gone", Err: slidingwindow.ErrStoreUnavailable})
		window.Health(slidingwindow.Health{Limiter: "gone", Down: true})
		sem.Trip(semaphore.Trip{Semaphore: "gone", Err: semaphore.ErrStoreTimeout})
		sem.Health(semaphore.Health{Semaphore: "gone", Down: true})
		for _, up := range []float64{0, 1} {
			window.Trip(slidingwindow.Trip{Limiter: "used"})
			sem.Trip(semaphore.Trip{Semaphore: "used"})
			got := a.Collect(t)
			for _, p := range []string{"slidingwindow", "semaphore"} {
				requireSeries(t, Series{p + "_store_up{}": up, p + "_store_away_seconds_total{}": 120 * up, p + "_store_outages_total{}": 1}, got)
			}
			time.Sleep(2 * time.Minute)
		}
	})
}

package main

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

func TestMain(m *testing.M) {
	if os.Getenv(childVariable) != "" { // as main does: the test's program is a process of the fleet, too
		os.Exit(child(os.Stdin, os.Stdout, os.Stderr))
	}
	status := m.Run()
	redistest.StopShared()
	os.Exit(status)
}

var opened atomic.Int64

// fresh returns clients of the shared server, and names that no other test uses.
func fresh(t testing.TB, keys int) (*clients, []string) {
	c, err := connect(redistest.Shared(t).Addr)
	require.NoError(t, err)
	t.Cleanup(c.close)
	return c, bucketNames(fmt.Sprintf("t%03d:", opened.Add(1)), keys)
}

func eachRival(t *testing.T, test func(t *testing.T, r rival)) {
	for _, name := range such(func(rival) bool { return true }) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, named(name)[0])
		})
	}
}

// A thousand keys are a thousand buckets, for every rival.
func TestKeysAreBuckets(t *testing.T) {
	const keys = 1000
	eachRival(t, func(t *testing.T, r rival) {
		switch {
		case r.name == ping:
			t.Skip("limits nothing")
		case !r.refuses:
			requireOwnPace(t, r)
		case !r.redis:
			requireOwnBurst(t, r)
		default:
			c, names := fresh(t, keys)
			few := exhausted // for redis_rate forgets a key as soon as its bucket is full again
			if r.name == leaseStore {
				few = limit{Rate: 2, Burst: 3} // an empty bucket has nothing to lease
			}
			l, err := r.open(c, names, few)
			require.NoError(t, err)
			for key := range keys {
				granted, err := l.Take(key)
				require.NoError(t, err)
				require.True(t, granted)
			}
			found, err := c.plain.Keys(t.Context(), "*"+strings.TrimSuffix(names[0], "0000000")+"*").Result()
			require.NoError(t, err)
			require.Equal(t, keys, len(found))
		}
	})
}

// requireOwnBurst requires that permits taken from one bucket are not missing from the next.
func requireOwnBurst(t *testing.T, r rival) {
	c, names := fresh(t, 1000)
	l, err := r.open(c, names, exhausted)
	require.NoError(t, err)
	for key := range names {
		for _, want := range []bool{true, false} {
			granted, err := l.Take(key)
			require.NoError(t, err)
			require.Equal(t, want, granted, "bucket %d", key)
		}
	}
}

// requireOwnPace: a limiter that lets callers wait serves each bucket for itself. A thousand permits of one bucket would
// take ten seconds.
func requireOwnPace(t *testing.T, r rival) {
	c, names := fresh(t, 1000)
	l, err := r.open(c, names, limit{Rate: 100, Burst: 1})
	require.NoError(t, err)
	began := time.Now()
	for key := range names {
		_, err := l.Take(key)
		require.NoError(t, err)
	}
	require.Less(t, time.Since(began), 5*time.Second)
}

// Every rival grants its burst, refuses then, and grants again when time has passed.
func TestRivalsLimit(t *testing.T) {
	eachRival(t, func(t *testing.T, r rival) {
		if !r.refuses {
			t.Skip("does not refuse")
		}
		l := limit{Rate: 2, Burst: 3} // go-redisstore forgets what it counts in windows of less than a second
		lim, took := burst(t, r, l)
		for took >= l.every() { // the machine was so slow that another permit may have come
			lim, took = burst(t, r, l)
		}
		require.NoError(t, redistest.Poll(10*time.Second, func() error {
			granted, err := lim.Take(0)
			if err == nil && !granted {
				err = errors.New("nothing is granted any more")
			}
			return err
		}))
	})
}

// burst asks for one permit more than there are, if the machine is fast enough.
func burst(t *testing.T, r rival, l limit) (limiter, time.Duration) {
	c, names := fresh(t, 1)
	lim, err := r.open(c, names, l)
	require.NoError(t, err)
	began := time.Now()
	var got []bool
	for range l.Burst + 1 {
		granted, err := lim.Take(0)
		require.NoError(t, err)
		got = append(got, granted)
	}
	took := time.Since(began)
	if took < l.every() {
		require.Equal(t, []bool{true, true, true, false}, got)
	}
	return lim, took
}

// What must be granted is, and what must be refused, as the workloads want it.
func TestWorkloadsAreAnswered(t *testing.T) {
	eachRival(t, func(t *testing.T, r rival) {
		c, _ := fresh(t, 0)
		b := &bench{clients: c, opened: int(1000 + opened.Add(1))}
		ld := load{Callers: 4, Keys: 3, Duration: 20 * time.Millisecond, Latencies: true}
		granted, err := b.enter(r, unlimited, ld, allGranted)
		require.NoError(t, err)
		require.NoError(t, errors.Join(granted.wrong...))
		n := drive(granted.limiter, ld)
		require.Positive(t, n.Granted)
		require.Zero(t, n.Errors, n.FirstError)
		require.Positive(t, n.Latencies.quantile(0.99))
		if r.refuses && r.name != leaseStore {
			refused, err := b.enter(r, exhausted, ld, allRefused)
			require.NoError(t, err)
			require.NoError(t, errors.Join(refused.wrong...))
		}
	})
}

// The account notices a permit too many, one too few, and a bound that does not hold.
func TestAccount(t *testing.T) {
	for name, l := range map[string]limit{"huge": unlimited, "small": {Rate: 1e-3, Burst: 10}} {
		t.Run(name, func(t *testing.T) {
			lim, err := openMemoryStore(nil, bucketNames("a", 2), l)
			require.NoError(t, err)
			a, err := openAccount(lim.(*tokenBuckets))
			require.NoError(t, err)
			for range 3 {
				granted, err := lim.Take(1)
				require.NoError(t, err)
				require.True(t, granted)
				a.granted++
			}
			require.NoError(t, a.check())
			a.granted++
			require.ErrorContains(t, a.check(), "the account is wrong")
			a.granted -= 2
			require.ErrorContains(t, a.check(), "the account is wrong")
			a.granted = 1e18
			require.ErrorContains(t, a.check(), "the bound is broken")
		})
	}
}

// A violated check ends the program with a status of its own, and marks the row.
func TestViolation(t *testing.T) {
	c := &contender{rival: rival{name: scriptStore}, limiter: taker(func(int) (bool, error) { return true, nil })}
	c.settle(counts{Granted: 2, Refused: 1}, allRefused)
	c.settle(counts{Granted: 2, Refused: 1}, allGranted)
	c.settle(counts{Errors: 1, FirstError: "down"}, either)
	f := c.figure()
	require.ErrorContains(t, f.wrong, "2 of 3 calls granted where all must be refused")
	require.ErrorContains(t, f.wrong, "1 of 3 calls refused where all must be granted")
	require.ErrorContains(t, f.wrong, "down")
	o := outcome{row: "row", targets: []target{{what: "x", value: 1, limit: 1}}}
	o.violate(f.wrong)
	r := results{outcomes: []outcome{o}}
	require.ErrorIs(t, r.broken(), errBroken)
	require.Contains(t, r.targetTable().Render(), "CHECK VIOLATED")
	require.Contains(t, string(r.markdown(nil)), "**check violated**")
	require.NoError(t, (&results{}).broken())
}

func TestMedian(t *testing.T) {
	for _, c := range []struct {
		all  []float64
		want float64
	}{{[]float64{3}, 3}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 3, 2}, 2.5}, {[]float64{1, 1e9, 2, 3, 0}, 2}} {
		require.Equal(t, c.want, median(c.all))
	}
	require.True(t, math.IsNaN(median(nil)))
}

func TestTargets(t *testing.T) {
	all := []figure{{rival: scriptStore, nanos: 50, allocs: 0.001}, {rival: redisRate, nanos: 100, allocs: 20}, {rival: redisRatePipe, nanos: 60}}
	for want, g := range map[string]goal{
		"0.5 × redis_rate ≤ 0.5 × redis_rate yes":                  timeAtMost(scriptStore, 0.5, redisRate),
		"0.5 × redis_rate ≤ 0.49 × redis_rate NO":                  timeAtMost(scriptStore, 0.49, redisRate),
		"2 × redis_rate ≥ 2 × redis_rate yes":                      throughputAtLeast(scriptStore, 2, redisRate),
		"1.2 × the best redis_rate ≥ 1.5 × the best redis_rate NO": throughputAtLeast(scriptStore, 1.5, redisRate, redisRatePipe),
		"0.001 a call ≤ 0.01 a call yes":                           noAllocations(scriptStore),
		"20 a call ≤ 0.01 a call NO":                               noAllocations(redisRate),
		"- ≥ 1 × redis_rate NO: lock store is not in this library": throughputAtLeast(lockStore, 1, redisRate),
		"- ≤ 1 × PING NO: nothing to compare with":                 timeAtMost(scriptStore, 1, ping),
		"- ≤ 0.01 a call NO: memory store is not in this library":  noAllocations(memoryStore),
		"0.833 × redis_rate ≥ 0.8 × redis_rate yes":                func([]figure) target { return target{value: 5. / 6, limit: 0.8, atLeast: true, unit: "× redis_rate"} },
		"12300000 a call ≤ 0 a call NO":                            func([]figure) target { return target{value: 12_345_678, unit: "a call"} },
		"1.23e+10 a call ≤ 0 a call NO":                            func([]figure) target { return target{value: 12_345_678_901, unit: "a call"} },
	} {
		got := g(all)
		require.Equal(t, want, got.measured()+" "+got.wanted()+" "+got.verdict())
	}
}

func TestHistogram(t *testing.T) {
	h := newHistogram()
	require.Zero(t, h.quantile(0.5))
	for i := range 1000 {
		h.add(time.Duration(i+1) * time.Microsecond)
	}
	other := newHistogram()
	other.merge(h)
	for q, want := range map[float64]time.Duration{0.5: 500 * time.Microsecond, 0.99: 990 * time.Microsecond, 1: time.Millisecond} {
		got := other.quantile(q)
		require.GreaterOrEqual(t, got, want)
		require.LessOrEqual(t, float64(got), float64(want)*17/16)
	}
	for _, d := range []time.Duration{0, 1, 15, 16, 17, 31, 32, 33, time.Second, math.MaxInt64} {
		s := step(d)
		require.GreaterOrEqual(t, ceiling(s), d)
		require.Less(t, s, len(h.Counts))
		require.Equal(t, s, step(ceiling(s)))
	}
}

func TestThousands(t *testing.T) {
	for f, want := range map[float64]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567"} {
		require.Equal(t, want, thousands(f))
	}
}

func execute(t *testing.T, args ...string) (status int, out, stderr string) {
	var o, e strings.Builder
	status = run(t.Context(), args, &o, &e)
	return status, o.String(), e.String()
}

func TestBadFlags(t *testing.T) {
	for _, args := range [][]string{
		{"--rounds", "0"}, {"--duration", "0s"}, {"--only", "("}, {"--out", ""}, {"--buckets", "1"}, {"--waiters", "1"}, {"--no"}, {"more"},
	} {
		status, _, stderr := execute(t, args...)
		require.Equal(t, exitUsage, status, args)
		require.Contains(t, stderr, strings.Split(args[0], " ")[0])
	}
	status, _, stderr := execute(t, "--help")
	require.Equal(t, exitOK, status)
	require.Contains(t, stderr, "--quick")
}

// The whole program, with the processes, the buckets, the waiters and the files.
func TestProgram(t *testing.T) {
	redistest.Shared(t) // skips where there is no redis-server
	dir := filepath.Join(t.TempDir(), "new")
	require.NoError(t, os.MkdirAll(dir, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, notesFile), []byte("Why *that* is so.\n"), 0o644))
	status, out, stderr := execute(t, "--quick", "--rounds", "1", "--duration", "20ms", "--buckets", "2000", "--waiters", "500",
		"--only", "^1 caller|refused|one process|bound|16 proc|buckets$|waiters|over callers", "--out", dir)
	require.Equal(t, exitOK, status, "%s\n%s", out, stderr)
	text, err := os.ReadFile(filepath.Join(dir, resultsFile))
	require.NoError(t, err)
	for _, want := range []string{
		"1 caller, 1 bucket", "refused under overload", "16 processes", "1 to 1,000,000 buckets", "100,000 waiters",
		scriptStore, redisRate, xTimeRate, "memory in Redis a bucket", "slowest process",
	} {
		require.Contains(t, out, want)
		require.Contains(t, string(text), want)
	}
	for _, want := range []string{"| CPU |", "| github.com/go-redis/redis_rate/v10 | v", "| redis-server | ", "## Targets not reached", "Why *that* is so."} {
		require.Contains(t, string(text), want)
	}
	require.Regexp(t, regexp.MustCompile(`\[1/\d+\] 1 caller, 1 bucket`), stderr)
	requirePicture(t, filepath.Join(dir, pictureFile))
}

// requirePicture: a legend with every rival that was measured.
func requirePicture(t *testing.T, file string) {
	f, err := os.Open(file)
	require.NoError(t, err)
	defer f.Close()
	var texts []string
	d := xml.NewDecoder(f)
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		if c, ok := token.(xml.CharData); ok {
			texts = append(texts, string(c))
		}
	}
	for _, name := range such(func(r rival) bool { return r.redis }) {
		require.Contains(t, texts, name)
	}
}

// The picture in the repository is what the program draws of the table beside it.
func TestPictureOfResults(t *testing.T) {
	dir := t.TempDir()
	text, err := os.ReadFile(resultsFile)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, resultsFile), text, 0o644))
	status, _, stderr := execute(t, "--draw", "--out", dir)
	require.Equal(t, exitOK, status, stderr)
	want, err := os.ReadFile(filepath.Join(dir, pictureFile))
	require.NoError(t, err)
	got, err := os.ReadFile(pictureFile)
	require.NoError(t, err)
	require.True(t, string(want) == string(got), "%s is old: run go run ./benchmarks --draw at the root", pictureFile)
	requirePicture(t, pictureFile)
}

func TestNothingToDraw(t *testing.T) {
	for name, text := range map[string]string{
		"no table":       "# Results\n",
		"a cell missing": "\n| callers | a | b |\n| --- | --- | --- |\n| 1 | 2 |\n",
		"no number":      "\n| callers | a |\n| --- | --- |\n| 1 | many |\n",
	} {
		t.Run(name, func(t *testing.T) {
			_, err := readLineTable(text)
			require.Error(t, err)
		})
	}
}

// BenchmarkLimiters is one granted call of each rival, on one bucket:
//
//	go test -run '^$' -bench Limiters -benchmem ./benchmarks
func BenchmarkLimiters(b *testing.B) {
	for _, name := range such(func(rival) bool { return true }) {
		for _, goroutines := range []int{1, 64} {
			b.Run(fmt.Sprintf("%s/goroutines=%d", name, goroutines), func(b *testing.B) {
				c, names := fresh(b, 1)
				l, err := named(name)[0].open(c, names, unlimited)
				require.NoError(b, err)
				b.ReportAllocs()
				if goroutines == 1 {
					for b.Loop() {
						take(b, l)
					}
					return
				}
				b.SetParallelism(max(1, goroutines/runtime.GOMAXPROCS(0)))
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						take(b, l)
					}
				})
			})
		}
	}
}

func take(b *testing.B, l limiter) {
	if granted, err := l.Take(0); !granted || err != nil {
		b.Errorf("granted %v, error %v", granted, err)
	}
}

// Package faultlab has the common parts of the tests of faults: checks of invariants, processes of the library under test that can be
// stopped and killed, servers whose clock can be stepped, and a network with faults.
package faultlab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Event is a number of permits that were used, or fell due, at a time in microseconds of one clock.
type Event struct {
	At      int64
	Permits int
}

// Worst returns how many permits more than rate (a second) × its length the fullest window holds, wherever it begins and
// however long it is. The order of the events does not matter.
//
// It pictures them as water poured into a vessel that leaks at the rate: the highest level is the answer.
func Worst(events []Event, rate float64) float64 {
	return WorstBy(events, func(from, to int64) float64 { return rate * float64(to-from) / 1e6 })
}

// WorstBy is Worst for a rate that changes: allowed is how many permits it makes from one time to another.
func WorstBy(events []Event, allowed func(from, to int64) float64) float64 {
	events = slices.SortedFunc(slices.Values(events), func(a, b Event) int { return cmp.Compare(a.At, b.At) })
	level, most := 0.0, 0.0
	for i, e := range events {
		if i > 0 {
			level = max(0, level-allowed(events[i-1].At, e.At))
		}
		level += float64(e.Permits)
		most = max(most, level)
	}
	return most
}

// Span is a time span in microseconds of one clock: of a permit that was due in it, or of a stay.
type Span struct{ From, To int64 }

// Surely returns by how much some window certainly exceeds rate × its length. Each span took place at one time between its ends, and a
// window has those that lie in it from end to end. If the result is at most a bucket's burst, there are times between those ends at which
// the bucket could have granted all of them; if not, there are none, and too much was granted. So no allowance is needed for lateness.
//
// Windows begin where one of the given does and end where one does. Going back from the last beginning, tree holds for each
// end how many there are, less what the rate allows.
func Surely(all []Span, rate float64) float64 {
	if len(all) == 0 {
		return 0
	}
	all = slices.SortedFunc(slices.Values(all), func(a, b Span) int { return cmp.Compare(b.From, a.From) })
	ends := make([]int64, len(all))
	for i, l := range all {
		ends[i] = l.To
	}
	slices.Sort(ends)
	origin := ends[0]
	size := 1
	for size < len(ends) {
		size *= 2
	}
	tree := make([]node, 2*size)
	for i := range size {
		tree[size+i].best = math.Inf(-1)
		if i < len(ends) {
			tree[size+i].best = -rate * float64(ends[i]-origin) / 1e6
		}
	}
	for i := size - 1; i > 0; i-- {
		tree[i].best = max(tree[2*i].best, tree[2*i+1].best)
	}
	most := 0.0
	for _, l := range all {
		first, _ := slices.BinarySearch(ends, l.To)
		add(tree, 1, 0, size, first)
		begin, _ := slices.BinarySearch(ends, l.From)
		most = max(most, best(tree, 1, 0, size, begin)+rate*float64(l.From-origin)/1e6)
	}
	return most
}

// node is the best value of its leaves. plus was added to all of them.
type node struct{ best, plus float64 }

// add counts one more for all leaves from the first on. A node has the leaves from low to below high.
func add(tree []node, at, low, high, first int) {
	switch {
	case high <= first:
	case low >= first:
		tree[at].best++
		tree[at].plus++
	default:
		middle := (low + high) / 2
		add(tree, 2*at, low, middle, first)
		add(tree, 2*at+1, middle, high, first)
		tree[at].best = max(tree[2*at].best, tree[2*at+1].best) + tree[at].plus
	}
}

// best is the best leaf from the first on.
func best(tree []node, at, low, high, first int) float64 {
	switch {
	case high <= first:
		return math.Inf(-1)
	case low >= first:
		return tree[at].best
	}
	middle := (low + high) / 2
	return max(best(tree, 2*at, low, middle, first), best(tree, 2*at+1, middle, high, first)) + tree[at].plus
}

// Windows are how many of the given lie from end to end in the windows of a length, one window for each, which begins with it.
func Windows(all []Span, window int64) iter.Seq2[Span, int] {
	return func(yield func(Span, int) bool) {
		all := slices.SortedFunc(slices.Values(all), func(a, b Span) int { return cmp.Compare(a.From, b.From) })
		for i, first := range all {
			n := 0
			for _, l := range all[i:] {
				if l.From >= first.From+window {
					break
				}
				if l.To < first.From+window {
					n++
				}
			}
			if !yield(first, n) {
				return
			}
		}
	}
}

// Fullest returns the largest number of spans that lie completely in one window of a length.
func Fullest(all []Span, window int64) (most int) {
	for _, n := range Windows(all, window) {
		most = max(most, n)
	}
	return most
}

// Crowd returns the largest number of spans at one time.
func Crowd(all []Span) (most int) {
	type change struct {
		at int64
		by int
	}
	var changes []change
	for _, l := range all {
		changes = append(changes, change{l.From, 1}, change{l.To, -1})
	}
	slices.SortFunc(changes, func(a, b change) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.by, b.by)) })
	there := 0
	for _, c := range changes {
		there += c.by
		most = max(most, there)
	}
	return most
}

// Noise bounds the error of Worst, in permits: the additional microsecond of every window, and floating point.
func Noise(rate float64) float64 { return rate*1e-6 + 1e-6 }

// Long reports whether tests run in their long form: TOKENBUCKET_LONG=1.
func Long() bool { return os.Getenv("TOKENBUCKET_LONG") == "1" }

// Lasting returns how long a part of a test is to last: the first, or the second with TOKENBUCKET_LONG=1.
func Lasting(short, long time.Duration) time.Duration {
	if Long() {
		return long
	}
	return short
}

// enough is the least number of calls before and during a fault for a meaningful test.
const (
	enoughBefore = 20
	enoughDuring = 1
)

// Bit fails the test if too few calls were made before the fault (20) or during it (1), so that the fault had no effect. It counts calls
// and does not measure their rate: most tests start the fault only after their callers have made these calls. The calls before show that
// the measurement works without the fault, also on a busy machine. The call during it shows that the fault affected a caller.
func Bit(t testing.TB, before, during int) {
	t.Helper()
	t.Logf("done before the fault: %d, during it: %d", before, during)
	if before < enoughBefore || during < enoughDuring {
		t.Fatalf("the fault did not bite: %d done before it (want %d), %d during it (want %d)", before, enoughBefore, during, enoughDuring)
	}
}

// Lateness measures how late this machine wakes sleeping goroutines.
type Lateness struct {
	most atomic.Int64
	halt func()

	mu      sync.Mutex
	stopped bool
	due     time.Time   // when the pause at hand was to end
	lates   []awakening // that were late by a millisecond or more, in their order
}

type awakening struct{ due, at time.Time }

// MeasureLateness starts a measurement that ends with the test or by Stop.
func MeasureLateness(t testing.TB) *Lateness {
	l := StartLateness()
	t.Cleanup(l.halt)
	return l
}

// MeasureTrips begins to measure how late answers of a server come, as well as how late this process is woken: it sleeps for 5 ms,
// asks the server for nothing, and what that takes counts as late, unless there is no answer. It shows what MeasureLateness does
// not: that the server is not given time. It is no good where the test itself makes the server hang.
func MeasureTrips(t testing.TB, addr string) *Lateness {
	client := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1, DialerRetries: 1})
	l := measure(5*time.Millisecond, func() error {
		err := client.Ping(context.Background()).Err()
		if answer := redis.Error(nil); errors.As(err, &answer) { // which it may not permit
			return nil
		}
		return err
	})
	t.Cleanup(func() { l.halt(); _ = client.Close() })
	return l
}

// StartLateness is MeasureLateness for a process that has no test: it measures until Stop.
func StartLateness() *Lateness { return measure(time.Millisecond, func() error { return nil }) }

// measure measures how much longer than a pause it takes to pause and to do something, again and again, where that does not fail.
func measure(pause time.Duration, do func() error) *Lateness {
	stop, stopped := make(chan struct{}), make(chan struct{})
	l := &Lateness{halt: sync.OnceFunc(func() { close(stop); <-stopped }), due: time.Now().Add(pause)}
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				l.mu.Lock()
				defer l.mu.Unlock()
				l.stopped = true
				return
			default:
			}
			time.Sleep(pause)
			err := do()
			l.mu.Lock()
			now := time.Now()
			if late := now.Sub(l.due); err == nil {
				if late >= pause {
					l.lates = append(l.lates, awakening{l.due, now})
				}
				l.Note(late)
			}
			l.due = now.Add(pause)
			l.mu.Unlock()
		}
	}()
	return l
}

// Since returns the largest lateness since a time, including a sleeper that is still to be woken.
func (l *Lateness) Since(then time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	most := time.Since(l.due)
	for _, a := range slices.Backward(l.lates) {
		if a.at.Before(then) {
			break
		}
		most = max(most, a.at.Sub(a.due))
	}
	return max(most, 0)
}

// Stalls returns the total time, between two times by Micros, by which sleepers were woken late, counting each that was late by at least
// least.
func (l *Lateness) Stalls(least time.Duration, from, to int64) (sum time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, a := range l.lates {
		if a.at.Sub(a.due) >= least {
			within := min(micros(a.at), to) - max(micros(a.due), from)
			sum += time.Duration(max(0, within)) * time.Microsecond
		}
	}
	return sum
}

// Note records the lateness of a sleeper elsewhere.
func (l *Lateness) Note(late time.Duration) {
	for {
		most := l.most.Load()
		if int64(late) <= most || l.most.CompareAndSwap(most, int64(late)) {
			return
		}
	}
}

// Most returns the largest lateness so far, including a sleeper that is still to be woken.
func (l *Lateness) Most() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	most := time.Duration(l.most.Load())
	if !l.stopped {
		most = max(most, time.Since(l.due))
	}
	return most
}

// Stop ends measuring, for a test that counts goroutines.
func (l *Lateness) Stop() { l.halt() }

// Turn is the stay of one caller in a queue: when it joined and when it was served, in microseconds of one clock.
type Turn struct{ Joined, Left int64 }

// Overtaken returns two turns of which the second joined more than slack after the first and left more than slack before it,
// if there are any. Slack stands for what lies between a caller's clock and the queue.
func Overtaken(turns []Turn, slack time.Duration) (first, second Turn, found bool) {
	micros := slack.Microseconds()
	turns = slices.SortedFunc(slices.Values(turns), func(a, b Turn) int { return cmp.Compare(a.Joined, b.Joined) })
	ahead := 0 // those before it joined more than slack before the turn at hand
	var last Turn
	for _, t := range turns {
		for ; turns[ahead].Joined < t.Joined-micros; ahead++ {
			if ahead == 0 || turns[ahead].Left > last.Left {
				last = turns[ahead]
			}
		}
		if ahead > 0 && t.Left < last.Left-micros {
			return last, t, true
		}
	}
	return Turn{}, Turn{}, false
}

// FIFO fails the test if a caller was overtaken. See Overtaken.
func FIFO(t testing.TB, turns []Turn, slack time.Duration) {
	t.Helper()
	if first, second, found := Overtaken(turns, slack); found {
		t.Errorf("who joined at %d and left at %d was overtaken by who joined at %d and left at %d (µs; slack %v)",
			first.Joined, first.Left, second.Joined, second.Left, slack)
	}
}

// cleanUpLimit is how long CleanUp waits for locks: those of holders that died last as long as their time to live, 500 ms by
// default.
const cleanUpLimit = 10 * time.Second

// CleanUp fails the test unless, within ten seconds, there is no lock left of those keys that begin with the prefix, and every
// such key has a time to live. It looks at every master of a cluster.
func CleanUp(t testing.TB, client redis.UniversalClient, prefix string) {
	t.Helper()
	ctx := context.Background()
	err := redistest.Poll(cleanUpLimit, func() error {
		if c, ok := client.(*redis.ClusterClient); ok {
			return c.ForEachMaster(ctx, func(ctx context.Context, c *redis.Client) error { return clean(ctx, c, prefix) })
		}
		return clean(ctx, client, prefix)
	})
	if err != nil {
		t.Error(err)
	}
}

// clean returns an error that names a lock or a key without a time to live on one server, or nil if there is none.
func clean(ctx context.Context, client redis.Cmdable, prefix string) error {
	pattern := strings.NewReplacer(`\`, `\\`, "*", `\*`, "?", `\?`, "[", `\[`).Replace(prefix) + "*"
	keys := client.Scan(ctx, 0, pattern, 1000).Iterator()
	for keys.Next(ctx) {
		key := keys.Val()
		left, err := client.PTTL(ctx, key).Result()
		switch {
		case err != nil:
			return err
		case left == -1:
			return fmt.Errorf("key %q lives for ever", key)
		case left >= 0 && strings.HasSuffix(key, ":lock"):
			return fmt.Errorf("lock %q is left, for %v", key, left)
		}
	}
	return keys.Err()
}

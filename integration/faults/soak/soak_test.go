//go:build linux

package soak

import (
	"cmp"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

const (
	// every is the time from one fault to the next; the longest lasts for half of it.
	every = 5 * time.Second
	// settle is how long after a fault the rate shall be used again: probes, new connections, and a clock that stands still for
	// one second.
	settle = 1500 * time.Millisecond
	// slack is what a call may take longer than it must, on a machine that wakes its sleepers in time; long, where what would keep it
	// for longer is the client, for five seconds, and not the store's timeout, for one.
	slack = 600 * time.Millisecond
	long  = 2 * time.Second
	// fair is what may lie between a caller's clock and the queue that it joins or leaves.
	fair = 50 * time.Millisecond
)

// soak is one run.
type soak struct {
	t       *testing.T
	began   time.Time
	seed    string
	random  *rand.Rand
	server  *redistest.Server
	clock   *faultlab.Clock
	proxy   *faultlab.Proxy
	control *redis.Client      // past the proxy
	trips   *faultlab.Lateness // of the server's answers, past the proxy
	fleet   []*process         // the last one is killed from time to time
	other   *process           // with the semaphore and the window

	mu  sync.Mutex
	all []*process // the dead too

	happened []*happening
	end      int64
}

// process is one of the library.
type process struct {
	*worker.Worker[event]
	name string
	// About once a second: bytes resident, bytes of Go, goroutines.
	rss, heap, gos []int64
	events         []event // in the order of their beginnings
	lates          []event
}

// happening is a fault that happened.
type happening struct {
	fault
	faultlab.Span
	bit, calls int
}

// start starts a process.
func (s *soak) start(store string) *process {
	s.mu.Lock()
	defer s.mu.Unlock()
	w := worker.Start[event](s.t, jobEnv, job{s.proxy.Addr, store, s.random.Uint64()})
	p := &process{Worker: w, name: fmt.Sprintf("%d, %s", len(s.all)+1, cmp.Or(store, "semaphore and window"))}
	s.all = append(s.all, p)
	return p
}

// replace starts a process in place of the last one, with the other store.
func (s *soak) replace() {
	last := len(s.fleet) - 1
	store := "script"
	if strings.HasSuffix(s.fleet[last].name, store) {
		store = "lock"
	}
	s.fleet[last] = s.start(store)
}

// Three processes want more of a bucket than it grants, a fourth holds permits of a semaphore and passes a window, on a server behind a bad
// network. Every five seconds there is a fault, for about half as long. All the time no more is granted than there is, except where a
// bucket is lost: then by no more than the loss costs. No caller waits for longer than its patience, or is overtaken; and after a fault the
// whole rate is used. Nothing is left behind.
func TestSoak(t *testing.T) {
	t.Cleanup(func() { goleak.VerifyNone(t, redistest.Dialing) }) // after all else has ended
	const seedEnv = "TOKENBUCKET_SEED"
	s := &soak{t: t, seed: cmp.Or(os.Getenv(seedEnv), strconv.FormatUint(rand.Uint64(), 10))}
	t.Setenv(seedEnv, s.seed)
	s.random = faultlab.Seed(t)
	s.server, s.clock = faultlab.StartStepped(t)
	s.proxy = faultlab.StartProxy(t, s.server.Addr)
	s.control = s.server.Client(t)
	s.trips = faultlab.MeasureTrips(t, s.server.Addr)
	total := cmp.Or(*lasts, faultlab.Lasting(20*time.Second, 3*time.Minute))
	require.GreaterOrEqual(t, total, 10*time.Second, "-soak")
	for _, store := range []string{"script", "lock", "script"} {
		s.fleet = append(s.fleet, s.start(store))
	}
	s.other = s.start("")
	require.Eventually(t, func() bool {
		return !slices.ContainsFunc(s.all, func(p *process) bool { return len(p.Events()) < 30 })
	}, time.Minute, 50*time.Millisecond, "all processes are at work")
	s.began = time.Now()
	halt := sync.OnceFunc(s.watch())
	defer halt()
	s.run(total)
	s.end = monotonic()
	s.trips.Stop()
	halt()
	s.collect()
	r := s.judge(total)
	faultlab.CleanUp(t, s.control, prefix)
	t.Log("\n" + r.text(t, s))
	faultlab.Figure(t, "faults", len(s.happened))
	faultlab.Figure(t, "permits used", r.permits)
	if *report != "" {
		assert.NoError(t, os.WriteFile(*report, []byte(r.text(t, s)), 0o644))
	}
}

// run lets one thing go wrong after the other.
func (s *soak) run(total time.Duration) {
	next := s.began.Add(2 * time.Second)
	var left []fault
	for ; time.Until(s.began) > -total+every/2; next = next.Add(every) {
		time.Sleep(time.Until(next))
		if len(left) == 0 {
			left = deck(s.random)
		}
		h := &happening{fault: left[0]}
		left = left[1:]
		d := 2*time.Second + time.Duration(s.random.Int64N(int64(every/10)))
		h.From = monotonic()
		var err error
		h.bit, err = h.do(s, d)
		h.To = monotonic()
		require.NoError(s.t, err, h.name)
		s.mu.Lock()
		s.happened = append(s.happened, h)
		s.mu.Unlock()
	}
	time.Sleep(time.Until(next))
}

// watch checks the processes' memory once a second, and logs the progress of the run once a minute, until halted.
func (s *soak) watch() (halt func()) {
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for seconds := 1; ; seconds++ {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			s.mu.Lock()
			for _, p := range s.all {
				if now := resident(p.Pid); now > 0 {
					p.rss = append(p.rss, now)
				}
			}
			if seconds%60 == 0 {
				last := s.happened[len(s.happened)-1]
				told := 0
				for _, p := range s.all {
					told += len(p.Events())
				}
				fmt.Fprintf(os.Stderr, "soak: %v, %d faults, the last %q; %d events; seed %s; failed: %v\n",
					time.Since(s.began).Round(time.Second), len(s.happened), last.name, told, s.seed, s.t.Failed())
			}
			s.mu.Unlock()
		}
	}()
	return func() { close(stop); <-stopped }
}

// resident is a process' memory in bytes, 0 if it has none.
func resident(pid int) int64 {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	line, _, _ := strings.Cut(rest, " kB")
	n, _ := strconv.ParseInt(strings.TrimSpace(line), 10, 64)
	return n << 10
}

// collect ends the processes and reads their events.
func (s *soak) collect() {
	var ending sync.WaitGroup
	for _, p := range s.all {
		ending.Go(func() {
			for _, e := range p.End() {
				switch e.What {
				case "late":
					p.lates = append(p.lates, e)
				case "memory":
					p.heap, p.gos = append(p.heap, int64(e.Bytes)), append(p.gos, int64(e.Goroutines))
				default:
					p.events = append(p.events, e)
				}
			}
			slices.SortFunc(p.events, func(a, b event) int { return cmp.Compare(a.Asked, b.Asked) })
			slices.SortFunc(p.lates, func(a, b event) int { return cmp.Compare(a.Asked, b.Asked) })
		})
	}
	ending.Wait()
}

// late is how late the process was woken at most, of those times that overlap with one.
func (p *process) late(within faultlab.Span) (most time.Duration) {
	const longest = int64(time.Minute / time.Microsecond)
	first, _ := slices.BinarySearchFunc(p.lates, within.From-longest, func(e event, at int64) int { return cmp.Compare(e.Asked, at) })
	for _, e := range p.lates[first:] {
		if e.Asked > within.To {
			break
		}
		if e.Granted >= within.From {
			most = max(most, span(e.Granted-e.Asked))
		}
	}
	return most
}

// late is how late any process was.
func (s *soak) late(within faultlab.Span) (most time.Duration) {
	for _, p := range s.all {
		most = max(most, p.late(within))
	}
	return most
}

// result is what a run has shown.
type result struct {
	total, calm            time.Duration
	permits                int
	failures               map[string]int
	segments               []account
	across                 []account
	whole                  account
	slowest                map[string]time.Duration
	overtaken, turns       int
	again, owned           int
	used, due              float64 // in fault-free times
	crowd, held            int
	fullest, passed        int
	memory                 []flatness
	late                   time.Duration
	calmWindows, tooLittle int
}

// account has the uses in one stretch of time: level by due times, which must be at most bound; worst by the times of use, which may exceed
// that by rate × late.
type account struct {
	what               string
	lasting            time.Duration
	permits            int
	level, worst, most float64
	late               time.Duration
}

func (s *soak) judge(total time.Duration) *result {
	t := s.t
	r := &result{total: total, failures: map[string]int{}, slowest: map[string]time.Duration{}, late: s.late(faultlab.Span{From: 0, To: s.end})}
	var permits []event
	for _, p := range s.all {
		for _, e := range p.events {
			if e.Again {
				r.again++
			}
			if e.Owned && (e.What == "permit" || e.What == "hasty") {
				r.owned++
			}
			switch e.What {
			case "permit", "hasty":
				permits = append(permits, e)
			case "held", "passed", "refused":
			default:
				r.failures[e.What]++
			}
		}
		s.inTime(r, p)
	}
	slices.SortFunc(permits, func(a, b event) int { return cmp.Compare(a.Asked, b.Asked) })
	r.permits = len(permits)
	for kind := range r.failures {
		assert.NotContains(t, kind, "odd")
		assert.NotContains(t, kind, "stuck")
	}
	s.bites(permits)
	s.bounds(r, permits)
	s.order(r)
	s.steady(r, permits)
	s.others(r)
	s.flat(r)
	return r
}

// inTime requires that every call returned by its deadline, plus at most the lateness of its process.
func (s *soak) inTime(r *result, p *process) {
	for _, e := range p.events {
		allowed, late := storeTimeout, long
		group := "reserve"
		switch {
		case e.What == "stuck": // said already
			continue
		case e.What == "held", strings.HasPrefix(e.What, "semaphore"):
			group = "semaphore"
		case e.What == "passed", strings.HasPrefix(e.What, "window"):
			group = "window"
		case strings.HasPrefix(e.What, "hasty"), e.What == "refused":
			group, allowed, late = "hasty", hurry, slack
		default:
			allowed += patience
		}
		took := span(e.Granted - e.Asked)
		r.slowest[group] = max(r.slowest[group], took)
		if allowed += late; took > allowed {
			woken := p.late(faultlab.Span{From: e.Asked, To: e.Granted})
			assert.LessOrEqual(s.t, took, allowed+3*woken, "%s: %s %q, at %v; it was %v late", p.name, group, e.What, s.at(e.Asked), woken)
		}
	}
}

// at is a time since the beginning.
func (s *soak) at(micros int64) time.Duration {
	return (time.Since(s.began) - span(monotonic()-micros)).Round(time.Millisecond)
}

// bites requires that calls were made before the first fault and during each.
func (s *soak) bites(permits []event) {
	before, _ := slices.BinarySearchFunc(permits, s.happened[0].From, func(e event, at int64) int { return cmp.Compare(e.Asked, at) })
	assert.GreaterOrEqual(s.t, before, 20, "permits before the first fault")
	for _, h := range s.happened {
		until := max(h.To, h.From+micros(time.Second)) // the effect of a fault that takes an instant
		for _, p := range s.all {
			for _, e := range p.events {
				if e.Asked > until {
					break
				}
				if e.Granted >= h.From {
					h.calls++
				}
			}
		}
		assert.Positive(s.t, h.bit, "%s did not bite at %v", h.name, s.at(h.From))
		assert.Positive(s.t, h.calls, "nobody called while: %s, at %v", h.name, s.at(h.From))
	}
	if s.at(s.end) > time.Duration(len(kinds)+1)*every {
		for _, k := range kinds {
			assert.True(s.t, slices.ContainsFunc(s.happened, func(h *happening) bool { return h.name == k.name }), "%s happened", k.name)
		}
	}
}

// stretches are the times between those faults that hold for another account: from the end of one to the beginning of the next.
func (s *soak) stretches(another func(*happening) bool, after time.Duration) (all []faultlab.Span) {
	from := int64(0)
	for _, h := range s.happened {
		if another(h) {
			all = append(all, faultlab.Span{From: from, To: h.From})
			from = h.To + micros(after)
		}
	}
	return append(all, faultlab.Span{From: from, To: 1 << 62})
}

func resets(h *happening) bool { return h.extra > 0 }

// bounds checks the uses.
//
// A permit belongs to a stretch if it was requested after its beginning and used before its end. It was decided in between, even if its
// caller asked again, so it came from the bucket as it was in that stretch. One that was requested before a fault and used after it may
// have come from either, and is left out of both stretches; fewer permits cannot exceed a bound that more keep to. Within a stretch there
// is no allowance: faults that lose permits do not create any.
//
// A permit was due between Due and Used. Surely reports whether all of a stretch can have come from one bucket, without an allowance for
// lateness: permit by permit, lateness is the time between the two. The usual measure by the times of use then exceeds the burst by at most
// rate × the worst lateness, and is reported beside it.
//
// Two stretches together, with the permits requested or used during the fault between them, may exceed that by the debt that the fault
// forgives. So may all of them together, by the sum of that.
func (s *soak) bounds(r *result, permits []event) {
	segments := s.stretches(resets, 0)
	sum := 0.0
	for i, within := range segments {
		what := "from the beginning"
		if i > 0 {
			what = "after: " + s.reset(i-1).name
		}
		r.segments = append(r.segments, s.account(what, granted(permits, within), burst))
		if i > 0 {
			h := s.reset(i - 1)
			sum += h.extra
			both := faultlab.Span{From: segments[i-1].From, To: within.To}
			r.across = append(r.across, s.account("across: "+h.name, granted(permits, both), burst+h.extra))
		}
	}
	r.whole = s.account("all", permits, burst+sum)
}

// reset is one of the faults that begin another account.
func (s *soak) reset(i int) *happening {
	for _, h := range s.happened {
		if resets(h) {
			if i == 0 {
				return h
			}
			i--
		}
	}
	return nil
}

func (s *soak) account(what string, permits []event, most float64) account {
	a := account{what: what, permits: len(permits), most: most}
	if len(permits) == 0 {
		return a
	}
	var due []faultlab.Span
	var used []faultlab.Event
	for _, e := range permits {
		due = append(due, faultlab.Span{From: e.Due, To: e.Used})
		used = append(used, faultlab.Event{At: e.Used, Permits: 1})
		a.late = max(a.late, span(e.Used-e.Due))
		assert.LessOrEqual(s.t, e.Due-e.Used, int64(1000), "µs before one was due")
	}
	a.lasting = span(permits[len(permits)-1].Asked - permits[0].Asked)
	a.level, a.worst = faultlab.Surely(due, rate), faultlab.Worst(used, rate)
	assert.LessOrEqual(s.t, a.level, most+faultlab.Noise(rate), "%s, at %v", what, s.at(permits[0].Asked))
	assert.LessOrEqual(s.t, a.worst, most+rate*a.late.Seconds()+faultlab.Noise(rate), "%s, by use, at %v", what, s.at(permits[0].Asked))
	return a
}

// between returns those of all, in the order of their beginnings, that lie within.
func between(all []event, within faultlab.Span) []event {
	first, _ := slices.BinarySearchFunc(all, within.From, func(e event, at int64) int { return cmp.Compare(e.Asked, at) })
	var those []event
	for _, e := range all[first:] {
		if e.Asked >= within.To {
			break
		}
		if max(e.Granted, e.Used) < within.To {
			those = append(those, e)
		}
	}
	return those
}

// granted returns those of all that lie within and were certainly granted within: what a process owns falls due after patience, and
// lapses soon after.
func granted(all []event, within faultlab.Span) []event {
	return slices.DeleteFunc(between(all, within), func(e event) bool { return e.Owned && e.Asked < within.From+micros(storeTimeout+patience) })
}

// order requires that no caller was overtaken in its process: among those that asked and were served between one fault's beginning or end
// and the next, except those that asked again, with the lateness of their process as slack. A caller that gets permits which the process
// owns, because another has given up, may pass those whose request is in flight: it delays none of them.
func (s *soak) order(r *result) {
	var cuts []int64
	for _, h := range s.happened {
		cuts = append(cuts, h.From, h.To)
	}
	from := int64(0)
	for _, to := range append(cuts, 1<<62) {
		within := faultlab.Span{From: from, To: to}
		from = to
		for _, p := range s.all {
			var turns []faultlab.Turn
			for _, e := range between(p.events, within) {
				if e.What != "permit" || e.Again || e.Owned {
					continue
				}
				turns = append(turns, faultlab.Turn{Joined: e.Asked, Left: e.Used})
			}
			r.turns += len(turns)
			allowed := fair + 2*p.late(within)
			if first, second, found := faultlab.Overtaken(turns, allowed); found {
				r.overtaken++
				assert.Fail(s.t, "overtaken", "%s: who joined at %v and left at %v was overtaken by who joined %v later and left %v earlier (slack %v)", p.name,
					s.at(first.Joined), s.at(first.Left), span(second.Joined-first.Joined), span(first.Left-second.Left), allowed)
			}
		}
	}
}

// steady requires that nine tenths of the rate are used in the times without a fault, after each kind of fault. Lateness at the ends of
// such a time does not count, nor does a time in which the machine gave the server none.
func (s *soak) steady(r *result, permits []event) {
	var used []int64
	for _, e := range permits {
		used = append(used, e.Used)
	}
	slices.Sort(used)
	type share struct{ used, due float64 }
	after := map[string]share{}
	for i, h := range s.happened {
		calm := faultlab.Span{From: h.To + micros(settle), To: s.end}
		if i+1 < len(s.happened) {
			calm.To = s.happened[i+1].From
		}
		length := span(calm.To - calm.From)
		late := s.late(calm)
		by := faultlab.Micros() - monotonic()
		stood := s.trips.Stalls(20*time.Millisecond, calm.From+by, calm.To+by)
		if length -= 2*late + stood; length <= 0 {
			s.t.Logf("after %q at %v nothing can be told: processes were %v late, the server's answers %v", h.name, s.at(h.To), late, stood)
			continue
		}
		first, _ := slices.BinarySearch(used, calm.From)
		last, _ := slices.BinarySearch(used, calm.To)
		r.calm += length
		r.used += float64(last - first)
		r.due += rate * length.Seconds()
		those := after[h.name]
		after[h.name] = share{those.used + float64(last-first), those.due + rate*length.Seconds()}
		r.calmWindows++
		if float64(last-first) < 0.9*rate*length.Seconds() {
			r.tooLittle++
			s.t.Logf("after %q at %v: %d permits used in %v", h.name, s.at(h.To), last-first, length)
		}
	}
	assert.Positive(s.t, r.calmWindows, "some time was without a fault")
	for _, kind := range slices.Sorted(maps.Keys(after)) {
		assert.GreaterOrEqual(s.t, after[kind].used, 0.9*after[kind].due, "permits used in calm times after: %s", kind)
	}
}

// others checks the semaphore and the window, between faults that begin another account of theirs. A permit that was requested after the
// beginning and released before the end counts from its acquisition; so does a request to the window that was answered.
func (s *soak) others(r *result) {
	for _, within := range s.stretches(resets, 0) {
		n := faultlab.Crowd(s.spans("held", within))
		r.crowd = max(r.crowd, n)
		assert.LessOrEqual(s.t, n, slots, "held at once, between %v and %v", s.at(within.From), s.at(min(within.To, s.end)))
	}
	for _, within := range s.stretches(func(h *happening) bool { return resets(h) || h.clock }, standstill) {
		n := faultlab.Fullest(s.spans("passed", within), micros(window))
		r.fullest = max(r.fullest, n)
		assert.LessOrEqual(s.t, n, limit, "passed a window, between %v and %v", s.at(within.From), s.at(min(within.To, s.end)))
	}
	always := faultlab.Span{From: 0, To: 1 << 62}
	r.held, r.passed = len(s.spans("held", always)), len(s.spans("passed", always))
	assert.Positive(s.t, r.held)
	assert.Positive(s.t, r.passed)
}

func (s *soak) spans(what string, within faultlab.Span) (all []faultlab.Span) {
	for _, e := range between(s.other.events, within) {
		switch {
		case e.What != what:
		case what == "held":
			all = append(all, faultlab.Span{From: e.Granted, To: e.Used})
		default:
			all = append(all, faultlab.Span{From: e.Asked, To: e.Granted})
		}
	}
	return all
}

// flatness is what memory a process had, and by which factor it may have grown.
type flatness struct {
	text string
	most float64
}

// flat requires that no process that lived for two minutes or longer has grown: of the second half of its life, the last tenth
// against the first, by the median, by a tenth at most; by a quarter if it lived for less than ten minutes, for then the tenths
// are of few seconds each, and the heap, buffers and pools have not come to rest. With the race detector, resident memory is only reported: its own
// grows.
func (s *soak) flat(r *result) {
	for _, p := range s.all {
		most := 1.1
		if len(p.rss) < 600 {
			most = 1.25
		}
		line := fmt.Sprintf("process %s, %d s:", p.name, len(p.rss))
		grown := func(what string, all []int64, scale float64, judged bool) {
			half := all[len(all)/2:]
			tenth := len(half) / 10
			first, last := median(half[:tenth]), median(half[len(half)-tenth:])
			line += fmt.Sprintf(" %s %.1f, then %.1f;", what, float64(first)/scale, float64(last)/scale)
			if judged {
				assert.LessOrEqual(s.t, float64(last), most*float64(first), "%s of process %s", what, p.name)
			}
		}
		if min(len(p.rss), len(p.heap)) < 120 {
			continue
		}
		grown("MB resident", p.rss, 1e6, !redistest.Raced)
		grown("MB of Go", p.heap, 1e6, true)
		grown("goroutines", p.gos, 1, true)
		r.memory = append(r.memory, flatness{strings.TrimSuffix(line, ";"), most})
	}
}

func median(all []int64) int64 {
	all = slices.Sorted(slices.Values(all))
	return all[len(all)/2]
}

// counts is a map in the order of its keys.
func counts(of map[string]int) string {
	var all []string
	for _, k := range slices.Sorted(maps.Keys(of)) {
		all = append(all, fmt.Sprintf("%s %d", k, of[k]))
	}
	return strings.Join(all, ", ")
}

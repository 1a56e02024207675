package semaphore

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

const (
	chaosPermits = 5
	chaosLease   = 500 * time.Millisecond
	chaosMargin  = chaosLease / 10
)

// belief is that a worker thought to hold a permit.
type belief struct {
	p        *process
	held     event
	until    int64 // 0 if unknown
	why      string
	released *event
	dones    []event // of other processes
	cut      bool    // until is not what the worker said
	truth    *grant
}

// fleet is four processes under faults, and what they say.
type fleet struct {
	t      *testing.T
	redis  *redis.Client
	addr   string
	seed   uint64
	random *rand.Rand
	spec   spec

	running []*process // of these one at most is stopped

	mu      sync.Mutex
	all     []*process
	beliefs map[int64]*belief // by fence
	byID    map[string]*belief
	given   []*belief // to be given back by another process
	stops   map[*process][]span
	late    []event
	by      []*process     // the processes that reported it
	without map[string]int // waits that ended without a permit
	strange []string
	doubles int
	dones   map[string]int
}

func (f *fleet) hear(p *process, e event) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch e.What {
	case "held":
		if f.beliefs[e.Fence] != nil {
			f.strange = append(f.strange, fmt.Sprint("two permits have the fence ", e.Fence))
		}
		b := &belief{p: p, held: e}
		f.beliefs[e.Fence], f.byID[e.ID] = b, b
		if e.Text != "" {
			f.given = append(f.given, b)
		}
	case "end":
		f.beliefs[e.Fence].until, f.beliefs[e.Fence].why = e.At, e.Text
	case "released":
		f.beliefs[e.Fence].released = &e
		if f.doubles += e.N - 1; e.ID != "" {
			f.strange = append(f.strange, e.ID)
		}
	case "done":
		f.byID[e.ID].dones = append(f.byID[e.ID].dones, e)
		what, _, _ := strings.Cut(e.Text, ":")
		f.dones[what]++
	case "without":
		what, _, _ := strings.Cut(e.Text, ":")
		f.without[what]++
	case "late":
		f.late, f.by = append(f.late, e), append(f.by, p)
	default:
		f.strange = append(f.strange, fmt.Sprintf("%+v", e))
	}
}

func (f *fleet) start() *process {
	f.mu.Lock()
	n := len(f.all)
	f.mu.Unlock()
	p := start(f.t, job{
		Do: "chaos", Redis: f.addr, Label: fmt.Sprint("process ", n), Semaphores: []spec{f.spec}, Workers: 50, Seed: f.seed + uint64(n),
	}, f.hear)
	f.mu.Lock()
	f.all = append(f.all, p)
	f.mu.Unlock()
	return p
}

// victim is a process that seems to hold permits for longer than a moment, which faults are to bite; -1: there is none.
func (f *fleet) victim() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	holds := map[*process]int{}
	for _, b := range f.beliefs {
		if b.until == 0 && now()-b.held.At > 15_000 {
			holds[b.p]++
		}
	}
	most, at := 0, -1
	for i, p := range f.running {
		if holds[p] > most {
			most, at = holds[p], i
		}
	}
	return at
}

// giveBack has permits given back by processes that do not hold them, until stop is closed.
func (f *fleet) giveBack(stop chan struct{}) {
	random := rand.New(rand.NewPCG(f.seed, 1))
	for {
		select {
		case <-stop:
			return
		case <-time.After(5 * time.Millisecond):
		}
		f.mu.Lock()
		given := f.given
		f.given = nil
		var others []*process
		for _, p := range f.all {
			if !p.ended.Load() {
				others = append(others, p)
			}
		}
		f.mu.Unlock()
		for _, b := range given {
			if p := others[random.IntN(len(others))]; p != b.p {
				p.command("done " + b.held.ID)
			}
		}
	}
}

// enough reports whether enough has happened to make faults and checks meaningful. A slow machine takes longer for it.
func (f *fleet) enough(counts map[string]int, seconds int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	threes := 0
	for _, b := range f.beliefs {
		if b.released != nil && b.held.N == 3 {
			threes++
		}
	}
	return min(counts["killed"], counts["stopped"], f.dones[""]) > seconds/4 && min(counts["normal connections"], counts["pubsub connections"]) > seconds/2 &&
		min(f.doubles, f.without["cancelled"], f.without["refused"]) > seconds && len(f.beliefs) > 20*seconds && threes > 12
}

// faults causes every kind of fault in the fleet, for the given time, and longer if that is not enough. It returns the number of each kind.
func (f *fleet) faults(long time.Duration) map[string]int {
	counts := map[string]int{}
	var next []string
	var stopped *process
	var stop span
	resume := func() {
		stopped.signal(f.t, syscall.SIGCONT)
		stop.back = now()
		f.mu.Lock()
		defer f.mu.Unlock()
		f.stops[stopped] = append(f.stops[stopped], stop)
		f.running = append(f.running, stopped)
		stopped = nil
	}
	for began := now(); ; {
		if lasts := micros(now() - began); lasts >= long && (lasts > 6*long || f.enough(counts, int(long.Seconds()))) {
			break
		}
		time.Sleep(time.Duration(50+f.random.IntN(200)) * time.Millisecond)
		if stopped != nil && micros(now()-stop.call) > chaosLease+time.Duration(100+f.random.IntN(500))*time.Millisecond {
			resume()
		}
		if len(next) == 0 { // each in turn, shuffled: none is missing by chance
			next = strings.Fields("kill kill stop stop normal normal normal pubsub pubsub pubsub")
			f.random.Shuffle(len(next), func(i, k int) { next[i], next[k] = next[k], next[i] })
		}
		i := f.victim()
		at := slices.IndexFunc(next, func(fault string) bool {
			return !(fault == "kill" && i < 0 || fault == "stop" && (i < 0 || stopped != nil))
		})
		if at < 0 {
			continue
		}
		fault := next[at]
		next = slices.Delete(next, at, at+1)
		switch fault {
		case "kill":
			f.running[i].kill()
			f.running[i] = f.start()
			counts["killed"]++
		case "stop":
			stopped, stop.call = f.running[i], now()
			f.running = slices.Delete(f.running, i, i+1)
			stopped.signal(f.t, syscall.SIGSTOP)
			counts["stopped"]++
		default:
			n, err := f.redis.Do(ctx, "CLIENT", "KILL", "TYPE", fault, "USER", fleetUser).Int()
			require.NoError(f.t, err)
			counts[fault+" connections"] += n
		}
	}
	time.Sleep(chaosLease + 200*time.Millisecond) // what the last fault has left behind is over
	if stopped != nil {
		resume()
	}
	return counts
}

// poll reads the holders, from the server and by Holders, until stop is closed.
func (f *fleet) poll(stop chan struct{}) (looks, most int) {
	sum := redis.NewScript(`
		local t, sum = redis.call('TIME'), 0
		local quiet = redis.call('HGET', KEYS[3], 'quiet')
		local at = quiet and quiet:find('\nholder ', 1, true)
		while at do
			at = quiet:find('\0', quiet:find('\0', at, true) + 1, true) + 1
			local n, expires = struct.unpack('<dd', quiet, at)
			if expires > t[1] * 1000000 + t[2] then sum = sum + n end
			at = quiet:find('\nholder ', at, true)
		end
		for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. t[1] .. string.format('%06d', t[2]), '+inf')) do
			sum = sum + tonumber(redis.call('HGET', KEYS[2], id):match('^%d+'))
		end
		return sum`)
	s := open(f.t, f.addr, f.spec.Name, f.spec.Permits)
	for {
		select {
		case <-stop:
			return looks, most
		case <-time.After(2 * time.Millisecond):
		}
		n, err := sum.Run(ctx, f.redis, []string{base(f.spec.Name) + "held", base(f.spec.Name) + "info", base(f.spec.Name) + "state"}).Int()
		require.NoError(f.t, err)
		most = max(most, n)
		if looks++; looks%10 != 0 {
			continue
		}
		holders, err := s.Holders(ctx)
		if err != nil { // its connection was killed too
			continue
		}
		n = 0
		for _, h := range holders {
			n += h.Permits
		}
		most = max(most, n)
	}
}

// stoppedDuring returns a stop of a process that overlaps the time between from and to, or ended just before; nil if there is none.
func (f *fleet) stoppedDuring(p *process, from, to int64) *span {
	const catchUp = 500_000
	for i, s := range f.stops[p] {
		if from <= s.back+catchUp && to >= s.call {
			return &f.stops[p][i]
		}
	}
	return nil
}

// settle computes until when each belief counts. Where a belief lacks a time, the server's account replaces it.
func (f *fleet) settle() {
	for _, b := range f.beliefs {
		if b.until == 0 { // killed with its process
			b.until, b.why, b.cut = b.p.killed, "killed", true
		}
		for _, d := range b.dones {
			if d.Text != "not held" && d.Call < b.until {
				b.until, b.why, b.cut = d.Call, "given back by another", true
			}
		}
		if f.stoppedDuring(b.p, b.held.At, b.until) != nil && b.truth != nil {
			b.until, b.cut = min(b.until, b.truth.Until()), true
		}
	}
}

// overlap returns how much is believed to be held at most, and for how long that is more than there is.
func overlap(beliefs map[int64]*belief, permits int) (most int, excess time.Duration) {
	type step struct {
		at int64
		n  int
	}
	var steps []step
	for _, b := range beliefs {
		if b.until > b.held.At {
			steps = append(steps, step{b.held.At, b.held.N}, step{b.until, -b.held.N})
		}
	}
	slices.SortFunc(steps, func(a, b step) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.n, b.n)) })
	n := 0
	for i, s := range steps {
		if n > permits {
			excess = max(excess, micros(s.at-steps[i-1].at))
		}
		n += s.n
		most = max(most, n)
	}
	return most, excess
}

// stories returns the histories of all permits by the clients' events. The server's account has the grants that no client has claimed: for
// waiters that were killed, had given up or were stopped. They were granted and ended at some time.
func (f *fleet) stories(m *truth) []*story {
	processes := map[string]*process{}
	for _, p := range f.all {
		processes[p.Label] = p
	}
	var all []*story
	for _, g := range m.grants {
		b := f.beliefs[g.Fence]
		if b == nil {
			open := span{processes[g.Label].began, forever}
			all = append(all, &story{fence: g.Fence, n: g.N, acquired: open, ends: []end{{lapse, open}}})
			continue
		}
		s := &story{fence: g.Fence, n: b.held.N, acquired: span{b.held.Call, b.held.At}}
		ended := false
		answered := func(text string, at span) {
			switch text {
			case "":
				s.ends = append(s.ends, end{release, at})
				ended = true
			case "not held":
				s.ends = append(s.ends, end{denied, at})
			default: // it may still be on its way
				s.ends = append(s.ends, end{lapse, span{at.call, forever}})
			}
		}
		if r := b.released; r != nil {
			answered(r.Text, span{r.Call, r.At})
		}
		for _, d := range b.dones {
			answered(d.Text, span{d.Call, d.At})
		}
		if !ended {
			earliest := b.until
			if stop := f.stoppedDuring(b.p, b.held.Call, b.until); stop != nil {
				earliest = min(earliest, stop.call)
			}
			s.ends = append(s.ends, end{lapse, span{earliest, forever}})
		}
		all = append(all, s)
	}
	return all
}

// Four processes of fifty workers each, five permits, and everything happens to them: what they believe to hold, what the
// server's commands show, and a model of a semaphore agree that there are never more than five held.
func TestNeverMoreThanPermits(t *testing.T) {
	long := 10 * time.Second
	if os.Getenv("TOKENBUCKET_LONG") != "" {
		long = time.Minute
	}
	s, client := server(t)
	addr := client.Options().Addr
	slow := faultlab.MeasureTrips(t, s.Addr)
	f := &fleet{
		t: t, redis: client, addr: addr, seed: faultlab.Seed(t).Uint64(), spec: spec{Name: "chaos", Permits: chaosPermits, Lease: chaosLease, Timeout: time.Second},
		beliefs: map[int64]*belief{}, byID: map[string]*belief{}, stops: map[*process][]span{},
		without: map[string]int{}, dones: map[string]int{},
	}
	f.random = rand.New(rand.NewPCG(f.seed, 0))
	m := monitor(t, addr, f.spec)["chaos"]
	for range 4 {
		f.running = append(f.running, f.start())
	}
	require.Eventually(t, func() bool { return f.victim() >= 0 }, 20*time.Second, 5*time.Millisecond)
	stop := make(chan struct{})
	var beside sync.WaitGroup
	looks, polled := 0, 0
	beside.Go(func() { f.giveBack(stop) })
	beside.Go(func() { looks, polled = f.poll(stop) })
	counts := f.faults(long)
	close(stop)
	beside.Wait()
	for _, p := range f.running {
		p.end(t)
	}
	m.end(t)

	// What happened.
	f.mu.Lock()
	defer f.mu.Unlock()
	worst := time.Duration(0)
	for i, e := range f.late {
		if f.stoppedDuring(f.by[i], e.Call, e.At) == nil {
			worst = max(worst, micros(int64(e.N)))
		}
	}
	claimed := 0
	for _, g := range m.grants {
		if b := f.beliefs[g.Fence]; b != nil {
			claimed++
			b.truth = g
			require.Equal(t, b.held.ID, g.ID)
			require.Equal(t, b.held.N, g.N)
			require.Equal(t, b.p.Label, g.Label)
		}
	}
	require.Equal(t, len(f.beliefs), claimed, "every permit was granted")
	whys := map[string]int{}
	f.settle()
	for _, b := range f.beliefs {
		whys[b.why]++
	}
	bereaved, lapsed := 0, 0 // permits whose process was killed; that expired while it was stopped
	back := time.Duration(0)
	for _, g := range m.grants {
		for _, p := range f.all {
			if p.Label != g.Label {
				continue
			}
			if p.killed != 0 && g.From < p.killed && (g.Removed == 0 || g.Removed > p.killed) {
				bereaved++
				require.NotZero(t, g.Removed, "%+v", g)
				back = max(back, micros(g.Removed-p.killed))
			}
			for _, s := range f.stops[p] {
				if g.From < s.call && g.Expires > s.call && g.Expires < s.back && g.Until() == g.Expires {
					lapsed++
				}
			}
		}
	}
	t.Logf("%v; %d acquired, %d grants unclaimed, renewed %d times; without: %v; released twice %d; given back by others %v; ends %v",
		counts, len(f.beliefs), len(m.grants)-claimed, renewals(m), f.without, f.doubles, f.dones, whys)
	t.Logf("%d places of killed processes, the last back after %v (lease %v); %d expired in stopped ones; woken at most %v late",
		bereaved, back, chaosLease, lapsed, worst)

	// The faults have bitten.
	seconds := int(long.Seconds())
	require.Greater(t, counts["killed"], seconds/6)
	require.Greater(t, counts["stopped"], seconds/6)
	require.Greater(t, counts["normal connections"], seconds/2)
	require.Greater(t, counts["pubsub connections"], seconds/2)
	require.Greater(t, bereaved, seconds/6)
	require.Greater(t, lapsed, seconds/6)
	require.Greater(t, len(f.beliefs), 20*seconds)
	require.Greater(t, renewals(m), seconds)
	require.Greater(t, f.doubles, seconds)
	require.Greater(t, f.dones[""], seconds/6)
	require.Greater(t, f.without["cancelled"], seconds)
	require.Greater(t, f.without["refused"], seconds)

	// And yet.
	require.Empty(t, f.strange)
	require.Empty(t, m.wrong)
	most, excess := overlap(f.beliefs, chaosPermits)
	t.Logf("held at most, of %d: %d as believed, %d by the server's commands, %d as polled %d times", chaosPermits, most, m.most, polled, looks)
	require.Equal(t, chaosPermits, m.most, "all were in use")
	require.LessOrEqual(t, polled, chaosPermits)
	// A worker stops when another goroutine is woken by a timer and then wakes it: each may be late.
	require.LessOrEqual(t, excess, max(0, 3*worst-chaosMargin), "more is believed to be held for longer than this machine explains")
	if 3*worst < chaosMargin {
		require.LessOrEqual(t, most, chaosPermits)
	}
	for _, b := range f.beliefs { // each belief for itself
		if !b.cut {
			require.GreaterOrEqual(t, b.held.At, b.truth.From, "%+v %+v", b.held, b.truth)
			require.LessOrEqual(t, micros(b.until-b.truth.Until()), max(0, 3*worst-chaosMargin), "%+v %s %+v", b.held, b.why, b.truth)
		}
	}
	require.LessOrEqual(t, back, chaosLease+100*time.Millisecond+10*max(worst, slow.Most()))

	began := time.Now()
	stories := f.stories(m)
	result, operations, open := check(chaosPermits, stories, 200)
	t.Logf("history of %d operations, %d of them open: %s in %v", operations, open, result, time.Since(began))
	require.Equal(t, porcupine.Ok, result)
	planted := 0
	last := stories[len(stories)-1].acquired.back
	for _, s := range stories[:len(stories)*3/4] { // a violation for the checker to find: three permits were never given back
		if s.ends[0].kind == release && planted < 3 && s.n == 3 {
			kept := s.ends
			s.ends = []end{{release, span{last, forever}}}
			result, _, _ = check(chaosPermits, stories, 200)
			require.Equal(t, porcupine.Illegal, result)
			s.ends = kept
			planted++
		}
	}
	require.Equal(t, 3, planted)
}

func renewals(m *truth) (n int) {
	for _, g := range m.grants {
		n += g.Renewed
	}
	return n
}

// All permits are a dead process' and others wait: its place is theirs when the lease is over.
func TestDeadHolder(t *testing.T) {
	t.Parallel()
	s, client := server(t)
	addr := client.Options().Addr
	specs := make([]spec, 12)
	for i := range specs {
		specs[i] = spec{Name: fmt.Sprint("dead", i), Permits: 1, Lease: time.Duration(4+i%3) * chaosLease}
	}
	truths := monitor(t, addr, specs...)
	killed, got := make([]int64, len(specs)), make([]int64, len(specs))
	slack := make([]time.Duration, len(specs))
	var running sync.WaitGroup
	slow := faultlab.MeasureTrips(t, s.Addr)
	random := faultlab.Seed(t)
	for i, s := range specs {
		p := start(t, job{Do: "crowd", Redis: addr, Label: "dead", Semaphores: []spec{s}}, nil)
		p.command("quota 1 once")
		p.expect(t, "set")
		p.command("wait 1 0")
		p.expect(t, "reached") // and keeps the permit
		next := open(t, addr, s.Name, 1, semaphore.WithLease(s.Lease))
		// What next does at intervals is not in step with the renewals.
		pause, life := time.Duration(random.Int64N(int64(s.Lease/3))), time.Duration(random.Int64N(int64(s.Lease)))
		running.Go(func() {
			time.Sleep(pause)
			running.Go(func() {
				time.Sleep(life)
				killed[i] = now()
				p.kill()
			})
			permit, err := next.Acquire(ctx, 1)
			got[i], slack[i] = now(), 50*time.Millisecond+10*slow.Since(time.Now().Add(-time.Second))
			if assert.NoError(t, err) {
				assert.NoError(t, permit.Release(ctx))
			}
		})
	}
	running.Wait()
	for i, s := range specs {
		m := truths[s.Name]
		m.end(t)
		require.Len(t, m.grants, 2)
		dead, next := m.grants[0], m.grants[1]
		kill, expiry := micros(got[i]-killed[i]), micros(got[i]-dead.Expires)
		t.Logf("lease %v: the next is admitted %v after the kill, %v after the lease, of %v", s.Lease, kill, expiry, slack[i])
		require.GreaterOrEqual(t, next.From, dead.Expires, "not before the lease is over")
		require.Positive(t, expiry)
		require.LessOrEqual(t, expiry, slack[i])
		require.LessOrEqual(t, kill, s.Lease+slack[i]+50*time.Millisecond)
	}
}

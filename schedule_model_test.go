//go:build !race

package tokenbucket

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/fair"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/schedule"
)

// world is a fleet on one bucket, in virtual time: what happens, when.
type world struct {
	random  *rand.Rand
	events  agenda
	now     int64
	seq     int64
	bucket  PermitBucket
	terms   *scheduled
	fleet   []*actor
	used    []use
	late    int64   // the latest use of a permit, after it was due
	spread  int64   // of the delays
	trip    int64   // the longest way there and back: a timeout counts from the store's decision
	stepped bool    // the clock was set back, or the bucket has a new epoch
	skew    int64   // of the store's clock
	extra   float64 // permits that a new bucket may add
	wrong   string
	trace   func(string)
	served  int
	asks    int
}

// scheduled are terms as a schedule wants to know them.
type scheduled struct{ *setting }

// PayLater implements schedule.Terms.
func (s *scheduled) PayLater() bool { return s.Payment == PayLater }

// use is a caller let go.
type use struct {
	at int64
	n  float64
	by int
}

// actor is one process of it: a schedule, and a way to the bucket and back.
type actor struct {
	*world
	id        int
	class     engine.Class
	floor     engine.Floor
	share     float64 // of the floor
	line      schedule.Schedule[*caller]
	delay     func() int64
	flying    bool
	flight    int64 // its number: an older one comes too late
	departed  int64
	reserving []*caller
	asleep    int64 // until then the process is stopped
	away      int64 // until then no caller of demand asks
	offset    clock.Offset
	order     int64
	last      map[int64]int64 // the order of who was let go last, by size
	penalty   schedule.Penalty
	until     int64 // when it ends, by the last reply
	epoch     int64
	due       int64 // when the next look is
	free      int64 // when the bucket's debt ends, by the last reply
	turns     modelTurns
}

type caller struct {
	schedule.Waiter[*caller]
	of       *actor
	order    int64
	again    int64  // the caller asks once more that long after it was served; 0 for never
	then     func() // when it was served
	reserved bool
	granted  bool
	turn     fair.Place[*caller]
}

type happening struct {
	at, seq int64
	do      func()
}

type agenda []happening

func (a agenda) Len() int { return len(a) }
func (a agenda) Less(i, j int) bool {
	return a[i].at < a[j].at || a[i].at == a[j].at && a[i].seq < a[j].seq
}
func (a agenda) Swap(i, j int) { a[i], a[j] = a[j], a[i] }
func (a *agenda) Push(x any)   { *a = append(*a, x.(happening)) }
func (a *agenda) Pop() any {
	old := *a
	x := old[len(old)-1]
	*a = old[:len(old)-1]
	return x
}

func (w *world) at(at int64, do func()) {
	w.seq++
	heap.Push(&w.events, happening{at, w.seq, do})
}

func (w *world) run(until int64) {
	for len(w.events) > 0 && w.events[0].at <= until {
		e := heap.Pop(&w.events).(happening)
		w.now = e.at
		e.do()
	}
	w.now = until
}

func (w *world) tell(format string, args ...any) {
	if w.trace != nil {
		w.trace(fmt.Sprintf("%10d ", w.now-1_000_000_000) + fmt.Sprintf(format, args...))
	}
}

func (w *world) fail(format string, args ...any) {
	if w.wrong == "" {
		w.wrong = fmt.Sprintf("%d µs: ", w.now) + fmt.Sprintf(format, args...)
	}
}

// awake does something when the process runs.
func (a *actor) awake(do func()) {
	if a.asleep > a.now {
		a.at(a.asleep, func() { a.awake(do) })
		return
	}
	do()
}

// ask is a caller who comes.
func (a *actor) ask(n, timeout, again int64) *caller {
	a.order++
	c := &caller{of: a, order: a.order, again: again}
	c.Value, c.Permits, c.Came, c.Until = c, n, a.now, schedule.Forever
	if timeout >= 0 {
		c.Until = a.now + timeout
	}
	a.look() // callers that are due are served first
	a.tell("%d: %d asks for %d until %d", a.id, c.order, n, c.Until-1_000_000_000)
	a.join(c)
	a.line.Join(&c.Waiter)
	a.look()
	return c
}

// reserve is a caller who wants its permits whenever they are due.
func (a *actor) reserve(n int64) *caller {
	a.order++
	c := &caller{of: a, order: a.order, reserved: true}
	c.Value, c.Permits, c.Came, c.Until = c, n, a.now, schedule.Forever
	a.reserving = append(a.reserving, c)
	a.look()
	return c
}

func (a *actor) leave(c *caller) {
	a.look()
	a.tell("%d: %d leaves", a.id, c.order)
	a.turns.Remove(&c.turn)
	a.line.Leave(&c.Waiter, a.now)
	a.look()
}

// look lets go who is due and asks for the rest.
func (a *actor) look() {
	if a.asleep > a.now {
		return
	}
	a.line.Hopeless(a.now, a.free, a.terms.PayLater(), func(n int64) int64 { return int64(float64(n) * a.terms.interval) })
	for _, w := range a.line.Expired() {
		a.turns.Remove(&w.Value.turn)
		a.tell("%d: %d expires", a.id, w.Value.order)
	}
	w, at := a.next()
	for ; w != nil; w, at = a.next() {
		c := w.Value
		a.used = append(a.used, use{a.now, float64(c.Permits), a.id})
		a.served++
		a.tell("%d: %d goes with %d, due at %d", a.id, c.order, c.Permits, at-1_000_000_000)
		if early := a.until - at; early > schedule.Jitter && a.skew == 0 {
			a.fail("process %d uses a permit %d µs before the end of a penalty", a.id, early)
		}
		if at > a.now {
			a.fail("process %d uses a permit %d µs before it is due", a.id, at-a.now)
		}
		if c.order < a.last[c.Permits] && !c.reserved && !a.stepped && a.turns.choose == nil {
			a.fail("process %d lets %d go before %d, who came earlier and wants as much", a.id, a.last[c.Permits], c.order)
		}
		if !c.reserved {
			a.last[c.Permits] = c.order
		}
		a.late = max(a.late, a.now-at)
		if late := at - c.Until; late > a.turns.trips()*a.trip && (lossRate == 0 || late > 1_000_000+a.trip) { // a first decision may take the store's timeout
			a.fail("process %d lets a caller go %d µs after its timeout", a.id, at-c.Until)
		}
		if then := c.then; then != nil {
			c.then = nil
			then()
		}
		if c.again > 0 {
			a.at(a.now+c.again, func() { a.awake(func() { a.ask(c.Permits, -1, c.again) }) })
		}
	}
	if a.line.Expire(a.now) {
		a.look()
		return
	}
	a.depart()
	if timeout := a.line.Timeout(); timeout != 0 && (at == 0 || timeout < at) {
		at = timeout
	}
	if next, ok := a.line.AskAt(); ok && !a.flying && (at == 0 || next < at) {
		at = max(next, a.now+1)
	}
	if at > 0 && (a.due <= a.now || at < a.due) {
		a.due = at
		a.at(at, func() { a.awake(a.look) })
	}
}

// depart sends the next batch.
func (a *actor) depart() {
	if a.flying {
		return
	}
	batch := &permit.Batch{Name: "x", Terms: &a.terms.setting.terms, Epoch: a.random.Int64N(1<<40) + 1}
	refund := a.line.Refund()
	if refund != nil {
		batch.Requests = append(batch.Requests, permit.Request{Op: permit.GiveBack, Back: permit.Refund{
			Epoch: refund.Epoch, Tag: refund.Tag, Tail: refund.Tail, To: refund.To, End: refund.End.Next,
		}})
	}
	var askers []*schedule.Waiter[*caller]
	var reaches []int64
	for _, c := range a.reserving {
		askers, reaches = append(askers, &c.Waiter), append(reaches, maxExact)
		batch.Requests = append(batch.Requests, permit.Request{Op: permit.Take, Permits: c.Permits, MaxWaitMicros: maxExact})
	}
	a.reserving = nil
	if at, ok := a.line.AskAt(); ok && at <= a.now {
		ahead, budget, first := a.line.Ahead(a.now, 1<<62), engine.Horizon(&a.terms.setting.terms), len(askers)
		floor := a.floor
		for w := a.line.Uncovered(); w != nil && len(askers) < 256; w = w.Following() {
			cost := engine.CostFromCold(&a.terms.setting.terms, w.Permits)
			reach := engine.LookAhead(&a.terms.setting.terms, floor.Next(a.class, w.Permits), w.Permits, ahead, a.offset.Trip())
			if len(askers) > first && ahead > 2*budget {
				break
			}
			ahead += cost
			askers = append(askers, w)
			reaches = append(reaches, reach)
			batch.Requests = append(batch.Requests, permit.Request{Op: permit.Take, Permits: w.Permits, MaxWaitMicros: max(0, min(reach, w.Until-a.now))})
		}
	}
	if len(batch.Requests) == 0 {
		return
	}
	a.asks++
	a.flying = true
	a.flight++
	a.departed = a.now
	number := a.flight
	lost := a.random.Float64()
	there, back := a.delay(), a.delay()
	if lost < lossRate {
		back = 1 << 50
	} else if lost < 2*lossRate {
		back += 1_500_000
	}
	a.at(a.now+there, func() {
		var out permit.Outcome
		err := a.bucket.apply(a.now+a.skew, batch, &out)
		if err != nil {
			a.fail("%v", err)
		}
		if back < 1<<50 {
			a.at(a.now+back, func() { a.awake(func() { a.land(number, batch, refund != nil, askers, reaches, &out) }) })
		}
	})
	a.at(a.now+1_000_000, func() {
		a.awake(func() {
			if a.flying && a.flight == number { // given up
				a.flying = false
				if refund != nil {
					a.line.Refunded(false, false, a.now)
				}
				for _, w := range askers { // they fail
					a.turns.Remove(&w.Value.turn)
					a.line.Leave(w, a.now)
				}
				a.look()
			}
		})
	})
}

var lossRate = 0.0

func (a *actor) land(number int64, batch *permit.Batch, refund bool, askers []*schedule.Waiter[*caller], reaches []int64, out *permit.Outcome) {
	inTime := a.flying && a.flight == number && a.now-a.departed < 1_000_000
	received := a.now
	a.free = out.Bucket.Next + received - out.NowMicros
	if sample := received - out.NowMicros; inTime {
		a.offset.Observe(sample, a.now-a.departed)
	}
	if inTime {
		a.epoch = out.Bucket.Epoch
		shorter, longer, held := a.penalty.Observe(out.Bucket.PausedMicros, out.Bucket.HeldUntilMicros, out.NowMicros)
		if shorter > 0 {
			a.until = a.now
			a.line.Resume(shorter, a.now)
		}
		if held {
			a.look() // callers that are due by now are served
			a.until = out.Bucket.HeldUntilMicros + a.offset.Micros()
			a.line.Pause(longer, a.until, a.now)
		}
	}
	requests := batch.Requests
	if refund {
		if inTime {
			a.tell("%d: refund: %v", a.id, requests[0].Grant.OK)
			a.line.Refunded(requests[0].Grant.OK, true, a.now)
		}
		requests = requests[1:]
	}
	for i := range requests {
		g := &requests[i].Grant
		a.tell("%d: ask of %d for %d within %d: %v %d", a.id, askers[i].Value.order, requests[i].Permits, requests[i].MaxWaitMicros, g.OK, g.WaitMicros)
		if p := &g.Place; g.OK && (inTime || p.Epoch == a.epoch) {
			a.floor.Spend(requests[i].Permits)
			grant := &schedule.Grant{Terms: a.terms, Before: p.Before, Permits: requests[i].Permits,
				Epoch: p.Epoch, Tag: p.Tag, Prev: p.Prev, Offset: a.offset.Micros()}
			if c := askers[i].Value; c.reserved && !c.granted {
				c.granted = true
				a.line.GrantTo(&c.Waiter, grant, a.now)
				a.line.Promise(&c.Waiter)
			} else {
				a.line.Grant(askers[i], grant, a.now)
			}
		}
	}
	refused := false
	for i := range requests {
		g := &requests[i].Grant
		if g.OK || !inTime {
			continue
		}
		if w := askers[i]; requests[i].MaxWaitMicros < reaches[i] { // it has no time for more
			a.turns.Remove(&w.Value.turn)
			a.line.Leave(w, a.now)
		} else if !refused {
			refused = true
			a.line.Refused(a.now, engine.Horizon(&a.terms.setting.terms), g.WaitMicros-reaches[i], a.random.Float64())
			if a.free > a.now {
				a.line.AskBy(a.free - a.offset.Trip())
			}
			a.floor.Earn(&a.terms.setting.terms, a.class, a.share, a.free-a.now, w.Permits, a.now)
		}
	}
	if inTime {
		a.flying = false
	}
	a.look()
}

func newWorld(seed uint64, c config) *world {
	s := newSetting(c)
	return &world{random: rand.New(rand.NewPCG(seed, 1)), now: 1_000_000_000, terms: &scheduled{setting: s}}
}

func (w *world) actor(delay func() int64) *actor {
	a := &actor{world: w, id: len(w.fleet), delay: delay, last: map[int64]int64{}}
	a.offset.Observe(delay(), 0) // it has had a reply before
	w.fleet = append(w.fleet, a)
	return a
}

// worstLevel is the bucket's bound that the uses so far would have needed.
func (w *world) worstLevel() float64 {
	slices.SortStableFunc(w.used, func(a, b use) int { return int(a.at - b.at) })
	return Worst(len(w.used), func(i int) (int64, float64) { return w.used[i].at, w.used[i].n }, w.terms.Rate)
}

// fault makes something happen: a process is stopped, the bucket is held back, reset or lost, or the store's clock is set back.
func (w *world) fault(r *rand.Rand, at int64, a *actor) {
	pause := 50_000 + r.Int64N(3_000_000)
	apply := func(q permit.Request) {
		b := &permit.Batch{Name: "x", Terms: &w.terms.setting.terms, Epoch: r.Int64N(1<<40) + 1, Requests: []permit.Request{q}}
		if err := w.bucket.apply(w.now+w.skew, b, &b.Outcome); err != nil {
			w.fail("%v", err)
		}
	}
	hold := func() {
		w.tell("held back for %d", pause)
		w.extra += w.terms.Rate * float64(pause) / 1e6 // used by processes that have not received it yet
		apply(permit.Request{Op: permit.Hold, HoldMicros: pause})
	}
	anew := func(lost bool) {
		w.stepped = true
		w.extra += 2*float64(max(0, w.bucket.NextFreeTicketMicros-w.now-w.skew))*w.terms.Rate/1e6 + w.terms.max + 20
		if w.tell("begun anew, lost: %v", lost); lost {
			w.bucket = PermitBucket{}
		} else {
			apply(permit.Request{Op: permit.Reset})
		}
	}
	switch r.IntN(8) {
	case 0:
		w.at(at, hold)
	case 1:
		w.at(at, func() { anew(false) })
	case 6, 7: // a later penalty, which some processes receive without having received the loss
		lost, length := r.IntN(2) == 0, pause
		w.at(at, hold)
		w.at(at+r.Int64N(2*pause), func() {
			anew(lost)
			if r.IntN(2) == 0 {
				pause = length/2 + r.Int64N(length)
			}
			hold()
		})
	case 2:
		w.at(at, func() {
			w.tell("clock set back")
			w.extra += 2 * w.terms.Rate
			w.stepped, w.skew = true, w.skew-2_100_000-10*pause
		})
	default:
		crowd := r.IntN(2) * 20
		w.at(at, func() {
			a.awake(func() { // some ask just before: the answer lies in the socket
				for range crowd {
					a.ask(1, -1, 0)
				}
				w.tell("%d: sleeps for %d", a.id, pause)
				a.asleep = a.now + pause
			})
		})
	}
}

// history runs a random history and returns its fault; "" if there is none. turns chooses the heads of the queues; nil if they are served by
// arrival.
func history(seed uint64, faults bool, turns choice) (wrong string, uses int) {
	r, classes := rand.New(rand.NewPCG(seed, 2)), rand.New(rand.NewPCG(seed, 3))
	c := config{Rate: []float64{5, 100, 1000, 33.3}[r.IntN(4)], Payment: Payment(r.IntN(2))}
	size := 0.0
	if r.IntN(2) == 0 {
		c.Kind, c.WarmupMicros, c.ColdFactor = warmingUp, 2_000_000, 3
	} else {
		size = []float64{0, 1, 10}[r.IntN(3)]
		c.Size, c.Floor = size, 0
	}
	w := newWorld(seed, c)
	if os.Getenv("TRACE") == fmt.Sprint(seed) {
		w.trace = func(s string) { fmt.Println(s) }
		fmt.Printf("%+v\n", c)
	}
	largest := []int64{1, 5, 20}[r.IntN(3)]
	base := []int64{100, 1000, 20_000}[r.IntN(3)]
	lossRate = 0
	w.trip = 2 * base
	for range 1 + r.IntN(5) {
		delay := func() int64 { return base }
		if faults {
			lossRate = 0.02
			own := []int64{100, 5000, 20_000}[r.IntN(3)]
			w.spread, w.trip = 41_000, 41_000
			delay = func() int64 { return own + r.Int64N(500) }
		}
		a := w.actor(delay)
		a.line.Strict = faults
		a.line.InTurns, a.turns.choose = turns != nil, turns
		if seed%2 == 1 {
			a.class, a.share = engine.Class(classes.IntN(int(engine.Classes))), 0.05
		}
	}
	biggest := int64(1)
	var callers []*caller
	at := w.now
	for range r.IntN(60) {
		at += r.Int64N(int64(2 * w.terms.interval * 5))
		a := w.fleet[r.IntN(len(w.fleet))]
		kind := r.IntN(10)
		switch {
		case kind < 6:
			for range 1 + r.IntN(8) {
				n := 1 + r.Int64N(largest)
				biggest = max(biggest, n)
				timeout := int64(-1)
				if r.IntN(3) == 0 {
					timeout = r.Int64N(int64(20 * w.terms.interval))
				}
				w.at(at, func() { a.awake(func() { callers = append(callers, a.ask(n, timeout, 0)) }) })
			}
		case kind < 9:
			w.at(at, func() {
				if len(callers) > 0 {
					c := callers[len(callers)-1-r.IntN(min(len(callers), 12))]
					c.of.awake(func() { c.of.leave(c) })
				}
			})
		case !faults:
			n := 1 + r.Int64N(largest)
			biggest = max(biggest, n)
			w.at(at, func() { a.awake(func() { callers = append(callers, a.reserve(n)) }) })
		default:
			w.fault(r, at, a)
		}
	}
	for w.now < at+1_000_000_000_000 && len(w.events) > 0 {
		w.run(w.now + 1_000_000)
	}
	for _, a := range w.fleet {
		if a.line.Waiting() && lossRate == 0 {
			w.fail("somebody still waits")
		}
	}
	bound := max(size, float64(biggest))
	if c.Payment == PayLater {
		bound = size + float64(biggest)
	}
	allowed := bound + w.extra + c.Rate*2e-6 + 1e-6
	if faults {
		allowed += c.Rate * (float64(w.spread) + schedule.Tolerated + 1) / 1e6
	} else if w.late > 0 {
		w.fail("a permit was used %d µs late", w.late)
	}
	if level := w.worstLevel(); level > allowed {
		w.fail("%v: %.3f in a window, allowed %.3f", c, level, allowed)
	}
	if w.late > schedule.Tolerated {
		w.fail("a permit was used %d µs late", w.late)
	}
	return w.wrong, w.served
}

// Random histories of fleets of one to five processes. The bucket's bound holds on the permits that are used, to the microsecond where
// delays are equal and no process is stopped. No caller is served before its due time or after its timeout, and every caller has a result. In
// every other history each process has a class of its own.
func TestScheduleModel(t *testing.T) {
	histories := 500
	if n, err := strconv.Atoi(os.Getenv("TOKENBUCKET_HISTORIES")); err == nil {
		histories = n
	}
	for _, faults := range []bool{false, true} {
		t.Run(fmt.Sprint("faults ", faults), func(t *testing.T) {
			uses := 0
			for seed := range uint64(histories) {
				wrong, n := history(seed, faults, nil)
				require.Empty(t, wrong, "seed %d", seed)
				uses += n
			}
			t.Logf("%d histories, %d calls served", histories, uses)
			require.Greater(t, uses, histories)
		})
	}
}

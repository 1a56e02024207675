package group

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

const (
	ms     = int64(1000)
	second = 1000 * ms
	start  = 1000 * second // the time at which tests of the parts begin, by all clocks
)

// steady is the arithmetic of a bursty bucket whose interval is a whole number of microseconds.
type steady struct{ interval, most int64 }

func (s steady) After(b permit.Balance, n int64) (permit.Balance, bool) {
	spend := min(n, int64(b.Stored))
	b.Stored -= float64(spend)
	b.Next += (n - spend) * s.interval
	return b, b.Next <= permit.MaxExact
}

func (s steady) Resync(b permit.Balance, now int64) permit.Balance {
	if now > b.Next {
		b.Stored = math.Floor(min(float64(s.most), b.Stored+float64((now-b.Next)/s.interval)))
		b.Next = now
	}
	return b
}

// bucket is a bucket of a shop, and how a participant knows it.
type bucket struct {
	terms   *permit.Terms
	limiter *engine.Limiter
	weight  int64

	permit.Bucket
	seq       int64 // of the newest grant
	given     int64 // permits that went back
	charged   int64 // permits of settlements
	unsettled bool  // settlements are refused
}

// shop is the stores of a test, in this process. It decides as the stores of the library do.
type shop struct {
	mu      sync.Mutex
	clock   func() int64 // of the stores
	buckets []*bucket
	fail    map[int]error              // by part
	before  func(part int)             // is called before a part decides, without the lock
	asked   []int                      // the parts, as they were asked
	joint   []int                      // how many joint requests they were asked for
	rows    map[int][][]permit.Request // of each part's first member: its joint requests
}

// bucketOf returns a bucket that grants a permit each interval, and stores up to size permits.
func bucketOf(name string, interval time.Duration, size int64) *bucket {
	s := steady{interval.Microseconds(), size}
	terms := &permit.Terms{Arithmetic: s, Text: fmt.Sprint("steady ", s, " 0"), Interval: float64(s.interval), Max: float64(size)}
	b := &bucket{terms: terms, weight: 1, Bucket: permit.Bucket{Terms: terms, Epoch: 1}}
	b.limiter = &engine.Limiter{Own: terms, MaxWaiters: 100,
		Coordinator: engine.New(engine.Config{Name: name, Key: name, Immediate: true, Clock: clockwork.NewRealClock()})}
	return b
}

// shopOf returns a shop.
func shopOf(buckets ...*bucket) *shop {
	return &shop{buckets: buckets, fail: map[int]error{}, rows: map[int][][]permit.Request{}}
}

// empty makes the buckets new ones, without stored permits.
func (s *shop) empty() {
	for _, b := range s.buckets {
		b.Balance = permit.Balance{Next: s.clock()}
	}
}

// config returns the configuration of a participant whose members are the buckets, all in one part unless parts are given.
func (s *shop) config(choice permit.Choice, parts ...[]int) Config {
	c := Config{Choice: choice, Parts: parts, Decide: s.decide, Immediate: true, MaxWaiters: 100, Timeout: time.Second, Clock: clockwork.NewRealClock(),
		Failure: func(member int, err error) error { return fmt.Errorf("member %d: %w", member, err) }, Lost: new(atomic.Int64)}
	all := []int{}
	for i, b := range s.buckets {
		c.Members = append(c.Members, Member{b.limiter, b.weight})
		all = append(all, i)
	}
	if len(parts) == 0 {
		c.Parts = [][]int{all}
	}
	return c
}

func (s *shop) decide(_ time.Time, part int, g *permit.Group) error {
	if s.before != nil {
		s.before(part)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked, s.joint = append(s.asked, part), append(s.joint, g.Joint)
	if err := s.fail[part]; err != nil {
		return err
	}
	now := s.clock()
	of := make([]*bucket, len(g.Members))
	for i, batch := range g.Members {
		for _, b := range s.buckets {
			if b.limiter.Coordinator.Name == batch.Name {
				of[i] = b
			}
		}
		of[i].Balance = of[i].terms.Resync(of[i].Balance, now)
		own := batch.Requests[:len(batch.Requests)-g.Joint]
		for j := range own {
			of[i].alone(&own[j])
		}
	}
	s.rows[part] = append(s.rows[part], append([]permit.Request(nil), g.Members[0].Requests[len(g.Members[0].Requests)-g.Joint:]...))
	for i := range g.Joint {
		together(g, of, i, now)
	}
	for i, batch := range g.Members {
		batch.Outcome = permit.Outcome{NowMicros: now, ClockMicros: now, Bucket: of[i].Bucket}
	}
	return nil
}

// given returns how many permits of each bucket have gone back.
func (s *shop) given() (permits []int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.buckets {
		permits = append(permits, b.given)
	}
	return permits
}

// charged returns what settlements have charged each bucket.
func (s *shop) charged() (permits []int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.buckets {
		permits = append(permits, b.charged)
	}
	return permits
}

// breaks makes a part fail from now on; nil ends that.
func (s *shop) breaks(part int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fail[part] = err
}

// alone decides a request of one member alone.
func (b *bucket) alone(r *permit.Request) {
	r.Grant = permit.Grant{}
	switch r.Op {
	case permit.GiveBack:
		if r.Grant.OK = r.Back.Tag == b.seq; r.Grant.OK {
			back := int64(r.Back.Spent) + (r.Back.End-r.Back.To.Next)/int64(b.terms.Interval)
			if b.given += back; b.Next == r.Back.End {
				b.Balance = r.Back.To
			} else { // it is stored by now
				b.Stored = min(b.terms.Max, b.Stored+float64(back))
			}
			b.seq = r.Back.Tail
		}
	case permit.Settle:
		if r.Grant.OK = !b.unsettled; r.Grant.OK {
			b.charged += r.Permits
		}
	}
}

// together decides a joint request.
func together(g *permit.Group, of []*bucket, i int, now int64) {
	first, fits := -1, 0
	for m, b := range of {
		r := g.Request(m, i)
		after, ok := b.terms.After(b.Balance, r.Permits)
		r.Grant = permit.Grant{Overflow: !ok, WaitMicros: max(after.Next, b.HeldUntilMicros) - now}
		if !ok || r.Grant.WaitMicros > r.MaxWaitMicros {
			continue
		}
		if fits++; first < 0 || r.Grant.WaitMicros < g.Request(first, i).Grant.WaitMicros {
			first = m
		}
	}
	for m, b := range of {
		if g.Choice == permit.All && fits == len(of) || g.Choice == permit.Any && m == first {
			b.take(g.Request(m, i))
		}
	}
}

func (b *bucket) take(r *permit.Request) {
	after, _ := b.terms.After(b.Balance, r.Permits)
	r.Grant.OK = true
	r.Grant.Place = permit.Place{Epoch: 1, Tag: b.seq + 1, Prev: b.seq, ID: b.seq + 1, Before: b.Balance, After: after}
	b.Balance = after
	b.seq++
}

// desk is the parts of a participant around a queue, without a lock, a timer and a clock: a test says what time it is.
type desk struct {
	*shop
	config  Config
	members []member
	view    view
	queue   queue
	now     int64
}

// deskOf returns the parts of a participant of a shop, at the time start.
func deskOf(s *shop, choice permit.Choice, parts ...[]int) *desk {
	d := &desk{shop: s, config: s.config(choice, parts...), now: start}
	s.clock = func() int64 { return d.now }
	s.empty()
	d.members = make([]member, len(d.config.Members))
	for i := range d.members {
		d.members[i].lost = new(atomic.Int64)
	}
	for i := range d.members {
		d.members[i].Member = d.config.Members[i]
		d.members[i].stored = permit.MaxBatch
	}
	d.view = view{config: &d.config, system: true}
	d.queue = queue{strict: true, config: &d.config, members: d.members, view: &d.view}
	return d
}

// call adds a call for permits to the queue. timeout is in microseconds.
func (d *desk) call(permits, timeout int64) *Call {
	q := NewCall(permits, timeout, 0, false)
	d.queue.join(q, d.now, 0)
	return q
}

// reserve adds a reservation to the queue.
func (d *desk) reserve(permits, timeout int64) *Call {
	q := NewCall(permits, timeout, 0, true)
	d.queue.join(q, d.now, 0)
	return q
}

// build fills a flight.
func (d *desk) build() *flight {
	f := newFlight(&d.config)
	f.local = d.now
	f.fill(&d.queue, 0)
	return f
}

// land settles the reply to a flight.
func (d *desk) land(f *flight) {
	d.queue.at = d.now
	r := reply{flight: f, now: d.now, config: &d.config, members: d.members, queue: &d.queue, view: &d.view}
	r.settle()
}

// trip has the next batch decided.
func (d *desk) trip() {
	f := d.build()
	f.run(&d.config)
	d.land(f)
}

// give gives a grant of permits of all members to a call, due at a time.
func (d *desk) give(q *Call, due int64) *grant {
	g := d.grant(q.permits, due)
	d.queue.keep(func(o *Call) bool { return o != q })
	d.queue.give(q, g, d.now)
	return g
}

// grant returns a grant of all members that is due at a time.
func (d *desk) grant(permits, due int64) *grant {
	g := newGrant(permits, len(d.members))
	for m := range g.parts {
		g.parts[m] = part{taken: true, terms: d.members[m].Limiter.Own, due: due, at: d.now, spent: permits * int64(d.members[m].Limiter.Own.Interval)}
	}
	g.settle()
	return g
}

// refunds returns how many permits of a member go back with the next batch.
func (d *desk) refunds(m int) (permits int64) {
	d.queue.returnSpare(d.now)
	for _, r := range d.members[m].refunds {
		permits += r.give.Permits
	}
	return permits
}

var errDown = errors.New("it is down")

// open returns a participant of a shop whose stores take a round trip, in a bubble.
func open(s *shop, choice permit.Choice, parts ...[]int) *Participant {
	c := s.config(choice, parts...)
	c.Immediate = false
	s.monitor()
	s.clock = func() int64 { return time.Now().UnixMicro() }
	s.empty()
	return New(c)
}

// monitor gives each bucket a store of its own that is monitored. Its probes fail as part 0 does.
func (s *shop) monitor() {
	for _, b := range s.buckets {
		health := engine.NewHealth(new(outage.Group), away, func(func(*engine.Coordinator) bool) {})
		health.Logger.Set(slog.New(slog.DiscardHandler))
		b.limiter.Coordinator = engine.New(engine.Config{
			Name: b.limiter.Coordinator.Name, Key: b.limiter.Coordinator.Key, Clock: clockwork.NewRealClock(), Timeout: time.Second, Health: health,
			Env: engine.Env{
				Away: away, NotAsked: func(error) bool { return false }, Failure: func(_ string, err error) error { return err },
				Probe: func(context.Context, string) error {
					s.mu.Lock()
					defer s.mu.Unlock()
					return s.fail[0]
				},
			},
		})
	}
}

func away(err error) bool { return errors.Is(err, permit.ErrStoreTimeout) || errors.Is(err, errDown) }

// bubble runs a test in virtual time, and lets the probes and the timers end.
func bubble(t *testing.T, test func(t *testing.T)) {
	synctest.Test(t, func(t *testing.T) {
		defer time.Sleep(time.Minute)
		test(t)
	})
}

// try asks a participant for permits within a timeout.
func try(ctx context.Context, p *Participant, permits int64, timeout time.Duration) Result {
	q := NewCall(permits, timeout.Microseconds(), 0, false)
	return p.Wait(ctx, q, p.Submit(ctx, q))
}

// reserve reserves permits of a participant, whenever they are due.
func reserve(t *testing.T, p *Participant, permits int64) (*Call, Result) {
	q := NewCall(permits, permit.MaxExact, 0, true)
	r := p.Wait(t.Context(), q, p.Submit(t.Context(), q))
	require.NoError(t, r.Err)
	return q, r
}

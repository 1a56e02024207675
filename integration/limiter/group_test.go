package limiter

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// mixedBucket is a bucket that groups and single limiters use by both stores.
type mixedBucket struct {
	name       string
	rate, size float64
	initial    float64
	look       *tb.RateLimiter // reads the state
	before     float64         // charged at the beginning
	others     time.Duration   // the longest wait for another member of a group

	mu        sync.Mutex // guards the fields below
	uses, due []faultlab.Permit
}

// used records a use of n permits, and when they were due in this bucket.
func (b *mixedBucket) used(p, due faultlab.Permit, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p.Permits, due.Permits = n, n
	b.uses, b.due = append(b.uses, p), append(b.due, due)
}

// charged returns the permits that the bucket was ever charged, but for a constant, as long as it was never full, and its state.
func (b *mixedBucket) charged(t *testing.T) (float64, tb.PermitBucket) {
	t.Helper()
	s, err := b.look.State(background)
	require.NoError(t, err)
	return (float64(s.NextFreeTicketMicros)-s.CarryMicros)/s.IntervalMicros - s.StoredPermits, s
}

// mixedGroup is a group with the buckets of its members and their weights.
type mixedGroup struct {
	*tb.Group
	buckets []*mixedBucket
	weights []int
}

// mixed is groups and single limiters of one to four processes on the same buckets of one server. The groups of a process use one Redis store and its
// single limiters the other or the same. Its processes are clients of one test process: each has limiters and groups of its own.
type mixed struct {
	t       *testing.T
	buckets []*mixedBucket
	groups  []*mixedGroup
	giveUp  bool // some callers do
	lasting bool // permits do not lapse, by the limiters' clock
	late    *faultlab.Lateness
	stop    context.Context
	callers sync.WaitGroup

	mu                      sync.Mutex
	grants, refusals, alone int
	putOff                  bool // permits have lapsed
}

// startMixed starts the callers.
func startMixed(t *testing.T, random *rand.Rand, server *redistest.Server, tight bool) *mixed {
	m := &mixed{t: t, giveUp: tight && random.IntN(2) == 0, lasting: !tight && random.IntN(2) == 0, late: faultlab.MeasureTrips(t, server.Addr)}
	stop, cancel := context.WithTimeout(background, faultlab.Lasting(1500*time.Millisecond, 5*time.Second))
	t.Cleanup(cancel)
	m.stop = stop
	prefix := tb.WithKeyPrefix(fmt.Sprint(t.Name(), ":"))
	waits := func(o *redis.Options) { o.ReadTimeout = patient }
	open := func(store tb.Store, b *mixedBucket, opts ...tb.Option) *tb.RateLimiter {
		opts = append([]tb.Option{tb.WithMaxPermits(b.size), tb.WithInitialPermits(b.initial), tb.WithStoreTimeout(patient)}, opts...)
		return open(t, b.name, b.rate, store, opts...)
	}
	looks := tb.NewRedisScriptStore(server.Client(t, waits), prefix)
	for i := range 2 + random.IntN(3) {
		b := &mixedBucket{name: fmt.Sprint(i), rate: []float64{5, 20, 50, 200}[random.IntN(4)], size: []float64{0, 1, 5}[random.IntN(3)]}
		if b.initial = b.size; !tight { // never full, so its state shows what was charged
			b.size, b.initial = 1e7, []float64{0, 1e6}[random.IntN(2)]
		}
		b.look = open(looks, b)
		r, err := b.look.Reserve(background, 1) // so the bucket exists
		require.NoError(t, err)
		require.NoError(t, r.Cancel(background)) // else its permit may lapse, and then it takes another one behind the callers
		b.before, _ = b.charged(t)
		m.buckets = append(m.buckets, b)
	}
	for range 1 + random.IntN(4) {
		trips := &faultlab.Trips{Now: faultlab.Micros}
		opts := []tb.Option{tb.WithObserver(tb.Observer{Trip: trips.Note})}
		if m.lasting {
			opts = append(opts, tb.WithClock(faultlab.Skewed(0)))
		}
		stores := redisStores(server.Client(t, waits), prefix)
		grouped := faultlab.Kinds[random.IntN(2)]
		single := faultlab.Kinds[random.IntN(2)]
		var members []*tb.RateLimiter
		for _, b := range m.buckets {
			members = append(members, open(stores[grouped], b, opts...))
			if random.IntN(2) == 0 {
				l := members[len(members)-1]
				if single != grouped {
					l = open(stores[single], b, opts...)
				}
				m.call(random, trips, []*mixedBucket{b}, []int{1}, true, func(n int, timeout time.Duration) (reservation, error) {
					return l.TryReserve(background, n, timeout)
				}, l.TryAcquire)
			}
		}
		for range 1 + random.IntN(2) {
			g := new(mixedGroup)
			var list []tb.Member
			for _, i := range random.Perm(len(m.buckets))[:1+random.IntN(len(m.buckets))] {
				g.buckets, g.weights = append(g.buckets, m.buckets[i]), append(g.weights, 1+random.IntN(2))
				list = append(list, tb.Weighted(members[i], g.weights[len(g.weights)-1]))
			}
			for _, b := range g.buckets {
				for _, o := range g.buckets {
					if o != b {
						b.others = longestTry // which is less than the look-ahead
					}
				}
			}
			var err error
			g.Group, err = tb.All(list...)
			require.NoError(t, err)
			m.groups = append(m.groups, g)
			for range 1 + random.IntN(6) {
				m.call(random, trips, g.buckets, g.weights, false, func(n int, timeout time.Duration) (reservation, error) {
					return g.TryReserve(background, n, timeout)
				}, g.TryAcquire)
			}
		}
	}
	return m
}

// longestTry is the longest timeout of a call.
const longestTry = 500 * time.Millisecond

// reservation is one of a limiter or of a group.
type reservation interface {
	OK() bool
	Delay() time.Duration
	Ready() <-chan struct{}
	Cancel(ctx context.Context) error
}

// call starts a caller of a group, or of a single limiter.
func (m *mixed) call(random *rand.Rand, trips *faultlab.Trips, buckets []*mixedBucket, weights []int, alone bool,
	reserve func(n int, timeout time.Duration) (reservation, error), acquire func(context.Context, int, time.Duration) (bool, error)) {
	mine := rand.New(rand.NewPCG(random.Uint64(), 1))
	m.callers.Go(func() {
		for m.stop.Err() == nil {
			n, timeout := 1+mine.IntN(2), time.Duration(mine.Int64N(int64(longestTry)))
			p := faultlab.Permit{Asked: faultlab.Micros()}
			ok, putOff := false, false
			var waits []tb.MemberOutcome // of a reservation of a group
			if mine.IntN(4) == 0 {
				c, cancel := background, func() {}
				if m.giveUp && mine.IntN(2) == 0 {
					c, cancel = context.WithTimeout(c, time.Duration(mine.Int64N(int64(longestTry))))
				}
				var err error
				ok, err = acquire(c, n, timeout)
				cancel()
				m.refusal(err, c != background)
				p.Granted, p.Used, p.Due = faultlab.Micros(), faultlab.Micros(), p.Asked
			} else {
				r, err := reserve(n, timeout)
				m.refusal(err, false)
				p.Granted = faultlab.Micros()
				if ok = err == nil && r.OK(); ok {
					if g, is := r.(*tb.GroupReservation); is {
						waits = g.Members()
					}
					delay := r.Delay()
					if m.giveUp && mine.IntN(4) == 0 && delay > 20*time.Millisecond {
						assert.NoError(m.t, r.Cancel(background))
						select {
						case <-r.Ready(): // it was due, so it is used
						default:
							continue
						}
					}
					<-r.Ready()
					putOff = r.Delay() > delay
					p.Used, p.Due = faultlab.Micros(), p.Asked+r.Delay().Microseconds()
					p.Way = trips.Way(p.Asked)
				}
			}
			m.mu.Lock()
			m.putOff = m.putOff || putOff
			switch {
			case !ok:
				m.refusals++
			case alone:
				m.alone++
			default:
				m.grants++
			}
			m.mu.Unlock()
			if ok {
				for i, b := range buckets {
					due := p
					if waits != nil {
						due.Due = p.Asked + waits[i].Wait.Microseconds()
					}
					b.used(p, due, n*weights[i])
				}
			}
			time.Sleep(time.Duration(mine.IntN(20)) * time.Millisecond)
		}
	})
}

// refusal fails the test if an error is neither that of a caller without enough time, nor of one that gave up.
func (m *mixed) refusal(err error, gaveUp bool) {
	switch {
	case errors.Is(err, tb.ErrNeverGranted):
	case gaveUp && (errors.Is(err, context.DeadlineExceeded) || errors.Is(err, tb.ErrStoreTimeout)): // the script ran too late
	case gaveUp && errors.Is(err, tb.ErrLockNotObtained): // it waited for the lock until its deadline
	default:
		assert.NoError(m.t, err)
	}
}

// window checks the bound of every window. A permit of a group may be used later than it was due, by the wait for another member. The times at which
// permits were due in the bucket itself have no such allowance. Those times are unknown if permits were handed on by a caller that gave up.
func (m *mixed) window(b *mixedBucket) {
	largest := 0
	spans := func(permits []faultlab.Permit) (all []faultlab.Span) {
		for _, p := range permits {
			largest = max(largest, p.Permits)
			for range p.Permits {
				all = append(all, faultlab.Due([]faultlab.Permit{p})...)
			}
		}
		return all
	}
	uses := spans(b.uses)
	bound := max(b.size, float64(largest)) + faultlab.Noise(b.rate)
	worst := faultlab.Surely(uses, b.rate)
	m.t.Logf("bucket %s of %v/s: %d permits, %.1f of %.1f beyond the rate in the fullest window", b.name, b.rate, len(uses), worst, bound+b.rate*b.others.Seconds())
	require.LessOrEqual(m.t, worst, bound+b.rate*b.others.Seconds(), b.name)
	if !m.giveUp && !m.lapsed() {
		worst := faultlab.Surely(spans(b.due), b.rate)
		m.t.Logf("bucket %s: %.1f of %.1f as they were due", b.name, worst, bound)
		require.LessOrEqual(m.t, worst, bound, b.name)
	}
}

// lapsed reports whether permits may have lapsed: their callers were woken more than 100 ms after they were due, or the replies came so late. A clock other
// than the system's excludes that, since it may have jumped.
func (m *mixed) lapsed() bool { return !m.lasting && (m.putOff || m.late.Most() > 50*time.Millisecond) }

// exact checks that a bucket was charged what was used, and nothing for refusals.
func (m *mixed) exact(b *mixedBucket) {
	used := 0
	for _, p := range b.uses {
		used += p.Permits
	}
	now, _ := b.charged(m.t)
	m.t.Logf("bucket %s of %v/s: %d permits used, %.3f charged", b.name, b.rate, used, now-b.before)
	require.GreaterOrEqual(m.t, now-b.before, float64(used)-0.01, "bucket %s", b.name)
	if !m.lapsed() {
		require.InDelta(m.t, used, now-b.before, 0.01, "bucket %s: permits were lost in refusals", b.name)
	}
}

// refuse makes one member of each group refuse, and checks that nothing is taken from any of them.
func (m *mixed) refuse(random *rand.Rand) {
	for _, g := range m.groups {
		busy := g.buckets[random.IntN(len(g.buckets))]
		debt, err := busy.look.Reserve(background, int(60*busy.rate)+int(busy.size))
		require.NoError(m.t, err)
		var before []tb.PermitBucket
		for _, b := range g.buckets {
			_, s := b.charged(m.t)
			before = append(before, s)
		}
		for range 3 {
			r, err := g.TryReserve(background, 1+random.IntN(2), time.Duration(random.IntN(int(time.Second))))
			require.NoError(m.t, err)
			require.False(m.t, r.OK())
			require.NotNil(m.t, r.RefusedBy())
			ok, err := g.TryAcquire(background, 1, 0)
			require.NoError(m.t, err)
			require.False(m.t, ok)
		}
		for i, b := range g.buckets {
			_, after := b.charged(m.t)
			s := before[i]
			require.Equal(m.t, []int64{s.Epoch, s.Seq, s.Tail}, []int64{after.Epoch, after.Seq, after.Tail}, "bucket %s has changed", b.name)
			owed := func(s *tb.PermitBucket) float64 {
				return float64(s.NextFreeTicketMicros) - s.StoredPermits*s.IntervalMicros
			}
			if after.StoredPermits < b.size { // a full bucket earns nothing
				require.InDelta(m.t, owed(&s), owed(&after), 1, "bucket %s has changed", b.name)
			}
		}
		require.NoError(m.t, debt.Cancel(background))
	}
}

// Random groups by one Redis store beside single limiters by the other, and groups of other processes, on the same random buckets of one server. A refusal
// takes nothing from any member, so all that a bucket is charged was used. No window of any bucket has more permits than its bound.
func TestMixedGroups(t *testing.T) {
	server := redistest.Start(t)
	for _, which := range []string{"exact", "windows"} {
		for i := range int(faultlab.Lasting(5, 40)) {
			t.Run(fmt.Sprint(which, i), func(t *testing.T) {
				t.Parallel()
				random := redistest.Seed(t)
				m := startMixed(t, random, server, which == "windows")
				m.callers.Wait()
				t.Logf("%d calls of groups and %d of single limiters were granted, %d were refused; lost %d", m.grants, m.alone, m.refusals, m.lost())
				for _, b := range m.buckets {
					if which == "windows" {
						m.window(b)
					} else {
						m.exact(b)
					}
				}
				if which == "exact" {
					if !m.lapsed() {
						require.Zero(t, m.lost())
					}
					m.refuse(random)
				}
			})
		}
	}
}

func (m *mixed) lost() (permits int64) {
	for _, g := range m.groups {
		permits += g.Lost()
	}
	return permits
}

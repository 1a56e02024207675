package tokenbucket

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redisbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// held is a reservation of a limiter or of a group.
type held interface {
	OK() bool
	Delay() time.Duration
	Settle(ctx context.Context, actual int) error
	SettleLater(actual int)
	Ready() <-chan struct{}
}

// payer is a limiter or a group whose reservations are settled, with its members and their weights.
type payer struct {
	members []*RateLimiter
	weights []int
	reserve func(n int) (held, error)
	waits   func(h held) []time.Duration // until the permits of each member are due
	close   func(context.Context) error
}

// newPayer returns a payer of n members on a store; one is a limiter.
func newPayer(t *testing.T, random *rand.Rand, n int, opts func(member int) (rate float64, opts []Option)) *payer {
	p := &payer{}
	var all []Member
	for m := range n {
		rate, opts := opts(m)
		l, err := NewSmoothBursty(fmt.Sprint("m", m, "-", random.Uint64()), rate, opts...)
		require.NoError(t, err)
		p.members, p.weights = append(p.members, l), append(p.weights, 1)
		if n > 1 {
			p.weights[m] = 1 + random.IntN(3)
		}
		all = append(all, Weighted(l, p.weights[m]))
	}
	if n == 1 {
		l := p.members[0]
		p.reserve = func(n int) (held, error) { return l.Reserve(background, n) }
		p.waits = func(h held) []time.Duration { return []time.Duration{h.Delay()} }
		p.close = l.Close
		return p
	}
	g, err := All(all...)
	require.NoError(t, err)
	p.reserve = func(n int) (held, error) { return g.Reserve(background, n) }
	p.waits = func(h held) (all []time.Duration) {
		for _, o := range h.(*GroupReservation).Members() {
			all = append(all, o.Wait)
		}
		return all
	}
	p.close = g.Close
	return p
}

// owed returns what the members' buckets owe, less what they have stored.
func (p *payer) owed(t *testing.T) (owed []float64) {
	for _, l := range p.members {
		b, err := l.State(background)
		require.NoError(t, err)
		owed = append(owed, (float64(b.NextFreeTicketMicros-b.SeenMicros)-b.CarryMicros)/b.IntervalMicros-b.StoredPermits)
	}
	return owed
}

// A settlement whose reply is lost, after the server has executed it, is charged once or, if the server did not receive it, not at all. It is an error. The
// bucket then has the actual cost or the estimate, and never both.
func TestLostSettlements(t *testing.T) {
	for _, which := range []string{"script", "lock"} {
		for members, what := range map[int]string{1: "limiter", 3: "group"} {
			t.Run(which+"/"+what, func(t *testing.T) {
				server, prefix := redistest.Shared(t), WithKeyPrefix(fmt.Sprint(t.Name(), rand.Uint64(), ":"))
				proxy := redistest.StartProxy(t, server.Addr)
				store := func(addr string) Store { // each lost reply keeps a connection
					return redisStores(server.Client(t, func(o *redis.Options) { o.Addr, o.ReadTimeout, o.PoolSize = addr, time.Minute, 100 }), prefix)[which]
				}
				random := rand.New(rand.NewPCG(uint64(members), 30))
				seed := random.Uint64()
				opts := func(s Store, timeout time.Duration) func(int) (float64, []Option) {
					return func(int) (float64, []Option) {
						return 1e-6, []Option{WithStore(s), WithMaxPermits(1e6), WithInitialPermits(5e5), WithStoreTimeout(timeout), Logged(t)}
					}
				}
				p := newPayer(t, rand.New(rand.NewPCG(seed, 1)), members, opts(store(proxy.Addr), 400*time.Millisecond))
				direct := newPayer(t, rand.New(rand.NewPCG(seed, 1)), members, opts(store(server.Addr), time.Minute))
				var applied, not, unasked int
				for i := 0; i < sized(60, 12); i++ {
					n := 1 + random.IntN(50)
					actual := random.IntN(2 * n)
					if actual == n {
						actual++
					}
					var h held
					require.NoError(t, redistest.Poll(20*time.Second, func() (err error) { h, err = p.reserve(n); return err }))
					before := direct.owed(t)
					fault := []redistest.Fault{redistest.CutAfter, redistest.LoseReply, redistest.CutBefore}[i%3]
					fired := false
					commit := map[string]script.Script{"script": redisbucket.ApplyScript, "lock": redisbucket.CommitScript}[which]
					if members > 1 {
						commit = map[string]script.Script{"script": redisbucket.GroupScript, "lock": redisbucket.GroupCommitScript}[which]
					}
					proxy.Match(commit.SHA, func(_ int64, args []string) redistest.Fault {
						if fired || which == "lock" && members > 1 && args[2+1+2*members] == "read" {
							return redistest.None
						}
						fired = true
						return fault
					})
					err := h.Settle(background, actual)
					bit := proxy.Bit()
					proxy.Match("", nil)
					if bit == 0 { // on a busy machine the outage after the last fault is not over
						require.ErrorIs(t, err, ErrStoreUnavailable)
						i--
						continue
					}
					if fault != redistest.CutBefore {
						require.Error(t, err, "the reply is lost")
					}
					require.NoError(t, h.Settle(background, actual), "it is not sent again")
					changed := func() (times []float64) {
						after := direct.owed(t)
						for m, w := range p.weights {
							times = append(times, math.Round((after[m]-before[m])/float64((actual-n)*w)*1e3)/1e3)
						}
						return times
					}
					var times []float64
					require.NoError(t, redistest.Poll(20*time.Second, func() error { // a server may execute it after its client has gone
						if times = changed(); fault != redistest.CutBefore && times[0] != 1 {
							return fmt.Errorf("charged %v times: %v, %d, %v", times, fault, i, err)
						}
						return nil
					}))
					for _, each := range times {
						require.Equal(t, times[0], each, "all members or none")
					}
					switch {
					case times[0] == 1 && err == nil:
						unasked++ // the client has sent again what the server did not receive
					case times[0] == 1:
						applied++
					default:
						require.Zero(t, times[0])
						require.Error(t, err)
						not++
					}
				}
				t.Logf("%d were settled without a reply, %d were not, %d were sent again before they were executed", applied, not, unasked)
				require.Positive(t, applied)
				require.Positive(t, not+unasked)
			})
		}
	}
}

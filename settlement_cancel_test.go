package tokenbucket

import (
	"context"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Forty callers reserve 500 permits at a time, at 10,000 a second. A fifth of the reservations is cancelled, the others are settled at 100 to 550
// permits. What the rate makes is used, or stored in the end.
func TestCancelBesideSettle(t *testing.T) {
	t.Run("memory", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) { cancelBesideSettle(t, NewMemoryStore(), 20*time.Second, 0.99) })
	})
	client := redistest.Shared(t).Client(t, func(o *redis.Options) { o.ReadTimeout = time.Minute })
	for name, store := range map[string]Store{"script": NewRedisScriptStore(client), "lock": NewRedisStore(client)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lasts, least := 3*time.Second, 0.97 // a head of the queue that cancels loses what was due of its 500 permits
			if os.Getenv("TOKENBUCKET_LONG") != "" {
				lasts, least = 30*time.Second, 0.99
			}
			cancelBesideSettle(t, store, lasts, least)
		})
	}
}

func cancelBesideSettle(t *testing.T, store Store, lasts time.Duration, least float64) {
	l, err := NewSmoothBursty(t.Name(), 10_000, WithStore(store), WithStoreTimeout(time.Minute))
	require.NoError(t, err)
	first, err := l.State(background)
	require.NoError(t, err)
	began := time.Now()
	var used atomic.Int64
	var wg sync.WaitGroup
	for i := range 40 {
		random := rand.New(rand.NewPCG(1, uint64(i)))
		wg.Go(func() {
			for time.Since(began) < lasts {
				r, err := l.TryReserve(background, 500, 3*time.Second)
				require.NoError(t, err)
				require.True(t, r.OK())
				if random.IntN(5) == 0 {
					time.Sleep(time.Duration(random.Int64N(int64(r.Delay()) + 1)))
					require.NoError(t, r.Cancel(background))
					if isReady(r) {
						used.Add(500)
					}
					continue
				}
				<-r.Ready()
				time.Sleep(20 * time.Millisecond)
				n := 100 + random.IntN(451)
				used.Add(int64(n))
				require.NoError(t, r.Settle(background, n))
			}
		})
	}
	wg.Wait()
	last, err := l.State(background)
	require.NoError(t, err)
	made := float64(last.NextFreeTicketMicros-first.SeenMicros)/first.IntervalMicros + first.StoredPermits - last.StoredPermits
	t.Logf("%d of %.0f permits are used", used.Load(), made)
	require.GreaterOrEqual(t, float64(used.Load()), least*made)
}

func isReady(r *Reservation) bool {
	select {
	case <-r.Ready():
		return true
	default:
		return false
	}
}

// Behind a debt of ten seconds, half of the reservations is cancelled at once, the others are settled at once. The debt is then exactly what was
// settled.
func TestCancelsAndSettlementsInDebt(t *testing.T) {
	for name, settle := range map[string]func(*testing.T, *Reservation){
		"settle":       func(t *testing.T, r *Reservation) { require.NoError(t, r.Settle(context.Background(), 20)) },
		"settle later": func(_ *testing.T, r *Reservation) { r.SettleLater(20) },
		"charge":       func(t *testing.T, r *Reservation) { require.NoError(t, r.Settle(context.Background(), 70)) },
	} {
		t.Run(name, func(t *testing.T) {
			l, err := NewSmoothBursty("x", 1e-3, WithMaxPermits(1), WithInitialPermits(0)) // it earns nothing meanwhile
			require.NoError(t, err)
			_, err = l.Reserve(background, 10_000)
			require.NoError(t, err)
			var cancelled, open atomic.Int64
			var wg sync.WaitGroup
			for i := range 8 {
				random := rand.New(rand.NewPCG(2, uint64(i)))
				wg.Go(func() {
					for range 60 {
						r, err := l.Reserve(background, 50)
						require.NoError(t, err)
						if random.IntN(2) == 0 {
							require.NoError(t, r.Cancel(background))
							cancelled.Add(50)
						} else {
							settle(t, r)
							open.Add(1)
						}
					}
				})
			}
			wg.Wait()
			require.NoError(t, l.Close(background))
			b, err := l.State(background)
			require.NoError(t, err)
			owed := float64(b.NextFreeTicketMicros-b.SeenMicros)/b.IntervalMicros - b.StoredPermits
			want := 10_000 + float64(open.Load()*20)
			if name == "charge" {
				want = 10_000 + float64(open.Load()*70)
			}
			t.Logf("%.0f of %d cancelled permits are lost", owed-want, cancelled.Load())
			require.InDelta(t, want, owed, 1)
		})
	}
}

package limiter

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Groups whose members are on two servers lose what one member has granted, another has refused, and other processes have taken permits behind meanwhile. No
// more than that: the buckets were charged what was used, and what Lost counts.
func TestLossAcrossServers(t *testing.T) {
	servers := []*redistest.Server{redistest.Start(t), redistest.Start(t)}
	waits := func(o *redis.Options) { o.ReadTimeout = patient }
	for _, kind := range faultlab.Kinds {
		for _, rates := range [][2]float64{{50, 200}, {50, 50}} {
			t.Run(fmt.Sprint(kind, rates), func(t *testing.T) {
				const processes, groupCallers, singleCallers = 6, 6, 4
				random := redistest.Seed(t)
				prefix := tb.WithKeyPrefix(fmt.Sprint(t.Name(), ":"))
				// Never full, so a state shows what the bucket was charged; and permits whose caller is late do not lapse, by this clock.
				size := []tb.Option{tb.WithMaxPermits(1e7), tb.WithInitialPermits(0), tb.WithStoreTimeout(patient), tb.WithClock(faultlab.Skewed(0))}
				var buckets []*mixedBucket
				for i, server := range servers {
					b := &mixedBucket{name: fmt.Sprint("member", i), rate: rates[i]}
					b.look = open(t, b.name, b.rate, tb.NewRedisScriptStore(server.Client(t, waits), prefix), size...)
					_, err := b.look.Reserve(background, 1)
					require.NoError(t, err)
					b.before, _ = b.charged(t)
					buckets = append(buckets, b)
				}
				var granted, refused, lost atomic.Int64
				var singles [2]atomic.Int64
				var groups []*tb.Group
				stop := time.Now().Add(faultlab.Lasting(3*time.Second, 20*time.Second))
				var callers sync.WaitGroup
				for range processes {
					var members []tb.Member
					for i, b := range buckets {
						l := open(t, b.name, b.rate, redisStores(servers[i].Client(t, waits), prefix)[kind], size...)
						members = append(members, l)
						for range singleCallers {
							callers.Go(func() {
								for time.Now().Before(stop) {
									ok, err := l.TryAcquire(background, 1, time.Second)
									assert.NoError(t, err)
									if ok {
										singles[i].Add(1)
									}
								}
							})
						}
					}
					g, err := tb.All(members...)
					require.NoError(t, err)
					groups = append(groups, g)
					for range groupCallers {
						mine := rand.New(rand.NewPCG(random.Uint64(), 2))
						callers.Go(func() {
							for time.Now().Before(stop) {
								ok, err := g.TryAcquire(background, 1, time.Duration(mine.IntN(1000))*time.Millisecond)
								assert.NoError(t, err)
								if ok {
									granted.Add(1)
								} else {
									refused.Add(1)
									time.Sleep(time.Duration(mine.IntN(20)) * time.Millisecond)
								}
							}
						})
					}
				}
				callers.Wait()
				for _, g := range groups {
					require.NoError(t, g.Close(background))
					lost.Add(g.Lost())
				}
				charged, used := 0.0, 2*float64(granted.Load())
				for i, b := range buckets {
					now, _ := b.charged(t)
					charged += now - b.before
					used += float64(singles[i].Load())
				}
				t.Logf("members of %v/s on two servers: %d calls of groups granted, %d refused, %d and %d of single limiters granted; %d permits lost, %.1f %% of %.0f charged",
					rates, granted.Load(), refused.Load(), singles[0].Load(), singles[1].Load(), lost.Load(), 100*float64(lost.Load())/charged, charged)
				require.NotZero(t, refused.Load())
				require.InDelta(t, used+float64(lost.Load()), charged, 0.01)
			})
		}
	}
}

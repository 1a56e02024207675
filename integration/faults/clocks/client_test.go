package clocks

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// E4: of four gateways one is an hour ahead, one an hour behind, and one's clock is set to and fro, while callers wait too.
// Nobody notices: the bound holds, each gets permits, and waits end when they are due.
func TestE4ClientSkew(t *testing.T) {
	t.Parallel()
	skews := [][]time.Duration{nil, {time.Hour}, {-time.Hour}, {0, time.Hour, 0, -time.Hour}}
	for name, stores := range map[string][]string{
		"script": {"script", "script", "script", "script"}, "lock": {"lock", "lock", "lock", "lock"}, "mixed": fleets["mixed"],
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			before := micros()
			r := start(t, server.Addr, stores, func(i int, j *faultlab.Job) { j.Skew = skews[i] })
			r.last(1500*time.Millisecond, 10*time.Second)
			end := micros()
			r.end()
			r.bit(end, before) // the clocks are wrong all the time
			r.bound("of 20", 0, always, burst)
			for i, p := range r.all {
				permits := p.Permits()
				t.Logf("clock off by %v: %d permits", skews[i], len(permits))
				assert.NotEmpty(t, permits)
				early := int64(0)
				for _, p := range permits {
					early = max(early, p.Due-p.Used)
				}
				assert.LessOrEqual(t, early, int64(1000), "µs before one was due")
			}
			assert.LessOrEqual(t, faultlab.MostLate(r.told), r.most(0), "nobody waits for a clock to be right")
			r.fewFailures(0)
			assert.LessOrEqual(t, r.denial(before, end), r.most(0))
			r.complete(server.Client(t))
		})
	}
}

// E4, one caller: the gateway's clock is set in the middle of a wait, which lasts as long as it would have.
func TestE4JumpDuringWait(t *testing.T) {
	t.Parallel()
	for name, by := range map[string]time.Duration{"forward": time.Hour, "back": -time.Hour} {
		for _, store := range []string{"script", "lock"} {
			t.Run(store+" "+name, func(t *testing.T) {
				t.Parallel()
				late := faultlab.MeasureLateness(t)
				job := faultlab.Job{
					Addrs: []string{redistest.Start(t).Addr}, Prefix: prefix, Bucket: bucket, Store: store, Rate: 4, Burst: 1,
					Skew: []time.Duration{0, by}, StoreTimeout: patient,
				}
				client := job.Client()
				defer func() { _ = client.Close() }()
				limiter, err := job.Limiter(client)
				require.NoError(t, err)
				_, err = limiter.Acquire(background, 1)
				require.NoError(t, err)
				waits := 0
				for try := 0; waits < 3 && try < 50; try++ { // on a busy machine a permit may be there before it is asked for
					began := time.Now()
					r, err := limiter.Reserve(background, 1)
					require.NoError(t, err)
					answered := time.Now()
					select {
					case <-r.Ready():
					case <-time.After(20 * time.Second):
						t.Fatal("it waits for the clock to be right")
					}
					passed, delay := time.Now(), r.Delay()
					if delay > 110*time.Millisecond { // so the clock was set within it
						waits++
					}
					require.GreaterOrEqual(t, passed.Sub(began), delay-time.Millisecond)
					require.LessOrEqual(t, passed.Sub(answered), most(delay, late.Most()))
				}
				require.Equal(t, 3, waits)
			})
		}
	}
}

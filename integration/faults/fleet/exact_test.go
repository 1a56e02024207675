package fleet

import (
	"fmt"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Four processes, with either store, on one bucket, at full demand for long enough to show a drift. The rate is exact within a percent, the
// bound holds by the server's clock, and every permit taken has reached its caller. By the times of use, lateness is added.
func TestA1BaselineA3Drift(t *testing.T) {
	const rate, burst = 500.0, 50.0
	server := redistest.Start(t)
	j := job{Rate: rate, Burst: burst}.on(t, server, "script")
	var fleet []faultlab.Job
	for _, store := range []string{"lock", "script", "lock", "script"} {
		fleet = append(fleet, faultlab.Job{
			Addrs: []string{server.Addr}, Prefix: j.Prefix, Bucket: j.Name, Store: store, Rate: rate, Burst: burst, Callers: 64,
			Timeout: time.Second, StoreTimeout: time.Minute, // a slow machine must not cause a timeout
		})
	}
	client := server.Client(t)
	trips := faultlab.MeasureTrips(t, server.Addr)
	processes := faultlab.StartFleet(t, fleet...)
	time.Sleep(faultlab.Lasting(10*time.Second, 3*time.Minute))
	told := processes.End()
	require.Empty(t, faultlab.Failures(told))
	used := faultlab.Used(told)
	b, err := j.open(t, client).State(background)
	require.NoError(t, err)
	lost := int(b.Seq) - 1 - len(used)
	if !faultlab.MayLapse(told) {
		require.Zero(t, lost, "what was taken reached its caller")
	} else {
		t.Logf("%d permits were taken and not used; sleepers were woken %v late, answers %v, callers put off by %v",
			lost, faultlab.MostWoken(told), trips.Most(), faultlab.MostPutOff(told))
		require.GreaterOrEqual(t, lost, 0)
	}

	from, until := used[0].At, used[0].At
	for _, e := range used {
		from, until = min(from, e.At), max(until, e.At)
	}
	withinBound(t, told, rate, burst)
	span, late := float64(until-from)/1e6, faultlab.MostLate(told).Seconds()
	share := (float64(len(used)) - burst) / (rate * span)
	t.Logf("%d permits in %.2f s", len(used), span)
	faultlab.Figure(t, "% of the rate", 100*share)
	require.LessOrEqual(t, share, 1+late/span+1e-3)
	stood := trips.Stalls(20*time.Millisecond, from, until).Seconds() // the machine stood still, so no call was possible
	t.Logf("this machine stood still for %.2f s of it", stood)
	require.GreaterOrEqual(t, share+float64(lost)/(rate*span), 0.99-(late+stood)/span)
	faultlab.CleanUp(t, client, j.Prefix)
}

// withinBound requires that permits keep to the bucket's bound by the server's clock, with nothing on top, and that none is used
// before it is due, or later than the machine makes it: twice as late as sleepers in those processes who have nothing to do with
// the library. Nine in ten are no later than twice what sleepers were just then; of one, another thread than the sleeper's may have
// stood still, for a second at most. By use, rate × that may come on top.
func withinBound(t *testing.T, told []faultlab.Permit, rate, burst float64) {
	t.Helper()
	due, woken, wokenLate := faultlab.Surely(faultlab.Due(told), rate), faultlab.MostWoken(told), faultlab.MostLate(told)
	t.Logf("callers were woken late by up to %v, sleepers %v", wokenLate, woken)
	faultlab.Figure(t, fmt.Sprintf("fullest window above rate × T, of %v", burst), due)
	faultlab.Figure(t, "the same by use", faultlab.Worst(faultlab.Used(told), rate))
	require.LessOrEqual(t, due, burst+faultlab.Noise(rate))
	const prompt, thread = 20 * time.Millisecond, time.Second
	require.LessOrEqual(t, wokenLate, prompt+thread+2*woken)
	late := 0
	for _, p := range told {
		if p.Used-p.Granted-(p.Due-p.Asked) > prompt.Microseconds()+2*p.Woken {
			late++
		}
		require.GreaterOrEqual(t, p.Used, p.Due-1000, "none before it is due: %+v", p)
	}
	require.LessOrEqual(t, late, len(told)/10, "let go later than sleepers were woken")
}

// Four million permits, and a hundred million with TOKENBUCKET_LONG=1, are requested at random moments, in virtual time. The grants match
// the rate, both while there is always a waiter and while the bucket stores permits without demand.
func TestA3DriftSimulated(t *testing.T) {
	random := faultlab.Seed(t)
	permits := int(faultlab.Lasting(400_000, 10_000_000))
	const asked = 50 // while no more than 49 come: the bucket is never full
	for _, rate := range []float64{3, 7.7, 1000, 80_000, 3e6} {
		for _, wait := range []float64{100, 0} { // in permits
			l, err := tokenbucket.NewSmoothBursty("b", rate, tokenbucket.WithMaxPermits(asked), tokenbucket.WithInitialPermits(0))
			require.NoError(t, err)
			b, err := l.State(background)
			require.NoError(t, err)
			began := b.SeenMicros
			now, granted, saved := began, 0, 0
			for granted < permits {
				if b.NextFreeTicketMicros < now {
					saved++
				}
				for range asked {
					if _, ok := b.Take(now, 1, time.Duration(wait*1e9/rate)); ok {
						granted++
					}
				}
				now += int64(random.Float64() * (asked - 1) * 1e6 / rate)
			}
			made := (float64(b.NextFreeTicketMicros-began)-b.CarryMicros)/1e6*rate - b.StoredPermits
			t.Logf("%v/s, waiting for up to %v: saved up %d times", rate, wait, saved)
			faultlab.Figure(t, "permits granted", granted)
			faultlab.Figure(t, "permits beyond the rate, of 0.001", float64(granted)-made)
			require.InDelta(t, made, granted, 1e-3)
			require.Equal(t, wait == 0, saved > 10_000)
		}
	}
}

// Without refunds, the server would also have refused every request that a snapshot refuses: each such refusal is compared with the bucket
// at the beginning of the call.
func TestH1RefusalsAreNeverWrong(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for store := range faultlab.Stores {
		t.Run(store, func(t *testing.T) {
			r := faultlab.Seed(t)
			j := job{Rate: 200, Burst: 10}.on(t, server, store)
			c := &trips{RedisClient: server.Client(t)}
			patient := tokenbucket.WithStoreTimeout(10 * time.Second)
			l, other := j.open(t, c, patient), j.open(t, server.Client(t), patient)
			local, asked, closest := 0, 0, time.Hour
			const enoughLocal, enoughAsked = 100, 20
			for began := time.Now(); ; {
				if is := time.Since(began); is > time.Minute || is > faultlab.Lasting(3*time.Second, 30*time.Second) && local > enoughLocal && asked > enoughAsked {
					break
				}
				if r.IntN(10) == 0 { // another process takes something
					_, err := other.TryReserve(background, 1+r.IntN(10), 100*time.Millisecond)
					require.NoError(t, err)
				}
				stored := func() string { return c.RedisClient.(*redis.Client).Get(background, j.Prefix+"{"+j.Name+"}").Val() }
				text := stored()
				for range r.IntN(10) {
					n, timeout := 1+r.IntN(10), time.Duration(r.IntN(30_000))*time.Microsecond
					time.Sleep(time.Duration(r.IntN(500)) * time.Microsecond)
					began, trips := time.Now().UnixMicro(), c.begun.Load() // the server's clock is this machine's
					reservation, err := l.TryReserve(background, n, timeout)
					require.NoError(t, err)
					if trips != c.begun.Load() {
						asked++
						text = stored()
						continue
					}
					require.False(t, reservation.OK())
					local++
					var b tokenbucket.PermitBucket
					require.NoError(t, b.UnmarshalText([]byte(text)))
					wait, granted := b.Take(began, n, timeout)
					require.False(t, granted, "%d permits within %v were refused without asking; the server would have granted them: %s", n, timeout, text)
					closest = min(closest, wait-timeout)
				}
			}
			t.Logf("%d asked", asked)
			faultlab.Figure(t, "refused without asking, none of them wrongly", local)
			faultlab.Figure(t, "before it could have been granted, the closest", closest)
			require.Greater(t, local, enoughLocal)
			require.Greater(t, asked, enoughAsked)
		})
	}
}

package state

import (
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// settlerEnv is the environment variable with the job of a process that settles.
const settlerEnv = "TOKENBUCKET_SETTLER_JOB"

// settlerJob is a process that reserves estimates and settles them, one operation at a time. It holds up to heldMost reservations meanwhile.
type settlerJob struct {
	faultlab.Job
	// Second reserves of a second bucket, too, secondWeight times as much, in a group.
	Second bool
	Seed   uint64
}

const (
	heldMost     = 5
	estimateMost = 20
	secondWeight = 2
	settlerRate  = 200.0 // permits a second
)

// step is what a settler is about to do, or has done.
type step string

const (
	asking   step = "asking"
	refused  step = "refused"
	reserved step = "reserved"
	used     step = "used"
	settling step = "settling"
	done     step = "settled"
)

// settlerEvent is a step of a settler's reservation. A process writes it before it asks the store, and again after the reply.
type settlerEvent struct {
	Step             step
	ID               int // of the reservation, in its process
	Estimate, Actual int
	At               int64           // faultlab.Micros
	Permit           faultlab.Permit // of reserved and used
}

// reservation is a reservation of a limiter or of a group.
type reservation interface {
	OK() bool
	Delay() time.Duration
	Ready() <-chan struct{}
	Settle(ctx context.Context, actual int) error
}

// limiters returns the job's limiters: one, or two that are the members of a group.
func (j *settlerJob) limiters(client redis.UniversalClient, opts ...tokenbucket.Option) (all []*tokenbucket.RateLimiter, err error) {
	opts = append(opts, tokenbucket.WithStore(faultlab.Stores[j.Store](client, tokenbucket.WithKeyPrefix(j.Prefix)))) // one for both: a step is atomic
	names := []string{j.Bucket}
	if j.Second {
		names = append(names, j.Bucket+"-second")
	}
	for _, name := range names {
		job := j.Job
		job.Bucket = name
		l, err := job.Limiter(client, opts...)
		if err != nil {
			return nil, err
		}
		all = append(all, l)
	}
	return all, nil
}

// open returns the job's TryReserve.
func (j *settlerJob) open(client redis.UniversalClient, opts ...tokenbucket.Option) (func(n int) (reservation, error), error) {
	all, err := j.limiters(client, opts...)
	if err != nil {
		return nil, err
	}
	if !j.Second {
		return func(n int) (reservation, error) { return all[0].TryReserve(background, n, j.Timeout) }, nil
	}
	g, err := tokenbucket.All(all[0], tokenbucket.Weighted(all[1], secondWeight))
	return func(n int) (reservation, error) { return g.TryReserve(background, n, j.Timeout) }, err
}

// settle is the process.
func settle(ctx context.Context, j *settlerJob, tell func(settlerEvent)) error {
	client := redis.NewClient(&redis.Options{Addr: j.Addrs[0], ReadTimeout: patient})
	defer func() { _ = client.Close() }()
	trips := faultlab.Trips{Now: faultlab.Micros}
	reserve, err := j.open(client, tokenbucket.WithObserver(tokenbucket.Observer{Trip: trips.Note}))
	if err != nil {
		return err
	}
	random := rand.New(rand.NewPCG(j.Seed, 1))
	type held struct {
		reservation
		settlerEvent
	}
	var open []held
	for id := 0; ctx.Err() == nil; time.Sleep(time.Duration(random.IntN(4000)) * time.Microsecond) {
		if len(open) > 0 && (len(open) == heldMost || random.IntN(2) == 0) {
			i := random.IntN(len(open))
			h := open[i]
			open = slices.Delete(open, i, i+1)
			h.Step, h.At, h.Permit = settling, faultlab.Micros(), faultlab.Permit{}
			tell(h.settlerEvent)
			if err := h.Settle(background, h.Actual); err != nil {
				return fmt.Errorf("settle: %w", err)
			}
			h.Step, h.At = done, faultlab.Micros()
			tell(h.settlerEvent)
			continue
		}
		id++
		n := 1 + random.IntN(estimateMost)
		p := faultlab.Permit{Permits: n, Asked: faultlab.Micros()}
		e := settlerEvent{Step: asking, ID: id, Estimate: n, Actual: random.IntN(2*n + 1), At: p.Asked}
		tell(e)
		r, err := reserve(n)
		if err != nil {
			return fmt.Errorf("reserve: %w", err)
		}
		p.Granted = faultlab.Micros()
		if e.At = p.Granted; !r.OK() {
			e.Step = refused
			tell(e)
			continue
		}
		p.Way = trips.Way(p.Asked)
		e.Step, e.Permit = reserved, p
		tell(e)
		<-r.Ready()
		p.Used, p.Due = faultlab.Micros(), p.Asked+r.Delay().Microseconds()
		p.Way = max(p.Way, trips.Way(p.Asked))
		e.Step, e.At, e.Permit = used, p.Used, p
		tell(e)
		open = append(open, held{r, e})
	}
	return nil
}

// charges is what the events of one process say about its reservations.
type charges struct {
	certain            int  // permits charged: estimates of those that were not settled, and actual costs of those that were
	open               *int // charged or not, by the operation that was in flight when the process was killed; nil if there was none
	unsettled, settled int  // reservations
}

// chargesOf returns what a process was charged. Its last event is of an operation in flight if that has no reply.
func chargesOf(events []settlerEvent) (c charges) {
	for i, e := range events {
		last := i == len(events)-1
		switch {
		case e.Step == asking && last:
			c.open = &e.Estimate
		case e.Step == reserved:
			c.certain += e.Estimate
			c.unsettled++
		case e.Step == settling && last:
			more := e.Actual - e.Estimate
			c.open = &more
		case e.Step == done:
			c.certain += e.Actual - e.Estimate
			c.unsettled, c.settled = c.unsettled-1, c.settled+1
		}
	}
	return c
}

// charged returns the permits that a bucket was ever charged, but for a constant, as long as it was never full: what it owes less what it has stored,
// counted from the time 0.
func charged(b tokenbucket.PermitBucket) float64 {
	return (float64(b.NextFreeTicketMicros)-b.CarryMicros)/b.IntervalMicros - b.StoredPermits
}

// mostBeyond returns by how much the fullest window exceeds the rate times its length, less the permits that went back since the first of its grants:
// the bound of [tokenbucket.Reservation.Settle]. A use counts as the least of its estimate and its actual cost, if it was settled.
func mostBeyond(all [][]settlerEvent, rate float64) (most float64) {
	type use struct {
		faultlab.Span
		permits        int
		asked, granted int64
	}
	type refund struct {
		at      int64
		permits int
	}
	var uses []use
	var began, ended []refund // the same refunds: when they began at the earliest, and ended at the latest
	for _, events := range all {
		at := map[int]int{}
		for i, e := range events {
			back := e.Estimate - e.Actual
			switch {
			case e.Step == used:
				at[e.ID] = len(uses)
				uses = append(uses, use{faultlab.Due([]faultlab.Permit{e.Permit})[0], e.Estimate, e.Permit.Asked - e.Permit.Way, e.Permit.Granted})
			case e.Step == settling && back > 0:
				began = append(began, refund{e.At, back})
				if i == len(events)-1 { // the process was killed
					ended = append(ended, refund{math.MaxInt64, back})
				}
			case e.Step == done:
				uses[at[e.ID]].permits = min(e.Estimate, e.Actual)
				if back > 0 {
					ended = append(ended, refund{e.At, back})
				}
			}
		}
	}
	until := func(refunds []refund, at int64) (sum int) { // at or before a time
		for _, r := range refunds {
			if r.at > at {
				break
			}
			sum += r.permits
		}
		return sum
	}
	byTime := func(a, b refund) int { return int(min(1, max(-1, a.at-b.at))) }
	slices.SortFunc(began, byTime)
	slices.SortFunc(ended, byTime)
	slices.SortFunc(uses, func(a, b use) int { return int(a.To - b.To) })
	for _, first := range uses {
		sum, asked, granted := 0, int64(math.MaxInt64), int64(0)
		for _, u := range uses {
			if u.From < first.From {
				continue
			}
			sum, asked, granted = sum+u.permits, min(asked, u.asked), max(granted, u.granted)
			if beyond := float64(sum) - rate*float64(u.To-first.From)/1e6; beyond > most {
				back := until(began, granted) - until(ended, asked-1)
				most = max(most, beyond-float64(back))
			}
		}
	}
	return most
}

// Processes that reserve an estimate and settle the actual cost are killed (SIGKILL) at random times, and others go on. A reservation that was not
// settled counts as its estimate, and one that was as its actual cost, once. Only the operation in flight of a killed process may or may not count, in
// all members of a group or in none. "deep" is a bucket that is neither full nor empty, so its state shows exactly what was charged. "tight" is one that
// the processes want more of than it grants, so its windows are full.
func TestKilledBetweenReserveAndSettle(t *testing.T) {
	deep := settlerJob{Job: faultlab.Job{Burst: 1e7}}
	tight := settlerJob{Job: faultlab.Job{Burst: 20, Timeout: longest}}
	both := deep
	both.Second = true
	server := redistest.Start(t)
	for _, kind := range faultlab.Kinds {
		for name, job := range map[string]settlerJob{"deep": deep, "tight": tight, "group": both} {
			t.Run(kind+"/"+name, func(t *testing.T) {
				t.Parallel()
				random := redistest.Seed(t)
				job.Addrs, job.Prefix, job.Bucket, job.Store, job.Rate = []string{server.Addr}, t.Name()+":", "b", kind, settlerRate
				job.StoreTimeout = patient
				client := server.Client(t, func(o *redis.Options) { o.ReadTimeout = patient })
				looks, err := job.limiters(client)
				require.NoError(t, err)
				state := func() (all []float64) {
					for _, l := range looks {
						b, err := l.State(background)
						require.NoError(t, err)
						all = append(all, charged(b))
					}
					return all
				}
				reserve, err := job.open(client)
				require.NoError(t, err)
				first, err := reserve(int(job.Burst / 4)) // so that a bucket is not full from now on
				require.NoError(t, err)
				require.True(t, first.OK())
				before := state()

				start := func() *worker.Worker[settlerEvent] {
					job.Seed = random.Uint64()
					return worker.Start[settlerEvent](t, settlerEnv, job)
				}
				stay := []*worker.Worker[settlerEvent]{start(), start()}
				all := slices.Clone(stay)
				settlements := func(w *worker.Worker[settlerEvent]) int { return chargesOf(w.Events()).settled }
				kills := int(faultlab.Lasting(8, 60))
				for range kills {
					w := start()
					all = append(all, w)
					faultlab.Soon(t, time.Minute, func() bool { return settlements(w) > 0 })
					time.Sleep(time.Duration(random.IntN(200_000)) * time.Microsecond)
					require.NoError(t, w.Kill())
				}
				for _, w := range stay {
					n := settlements(w)
					faultlab.Soon(t, time.Minute, func() bool { return settlements(w) > n+10 })
				}
				certain, settled, unsettled, open := 0, 0, 0, 0
				possible := map[int]bool{0: true} // sums of the operations in flight
				var events [][]settlerEvent
				for i, w := range all {
					events = append(events, w.End())
					c := chargesOf(events[i])
					certain, settled, unsettled = certain+c.certain, settled+c.settled, unsettled+c.unsettled
					if c.open == nil {
						continue
					}
					require.GreaterOrEqual(t, i, len(stay), "only a killed process leaves an operation in flight")
					open++
					for _, sum := range keys(possible) {
						possible[sum+*c.open] = true
					}
				}
				t.Logf("%d reservations were settled and %d were not, which counts %d permits; %d operations were in flight", settled, unsettled, certain, open)
				require.Positive(t, unsettled, "the kills left no reservation")
				beyond := mostBeyond(events, job.Rate)
				if name == "tight" {
					faultlab.Figure(t, fmt.Sprintf("permits beyond the rate in the fullest window, of %v", max(job.Burst, estimateMost)), beyond)
					require.LessOrEqual(t, beyond, max(job.Burst, estimateMost)+faultlab.Noise(job.Rate))
				}
				check := func() error { // a server may execute the last operation of a process after its end
					after := state()
					sum := after[0] - before[0] - float64(certain)
					switch whole := math.Round(sum); {
					case name == "tight" && sum >= float64(slices.Min(keys(possible)))-0.01: // a full bucket forgets what it earns
					case name == "tight" || math.Abs(sum-whole) > 0.01 || !possible[int(whole)]:
						return fmt.Errorf("charged %v permits more than the reservations: want one of %v", sum, keys(possible))
					case job.Second && math.Abs(after[1]-before[1]-secondWeight*(after[0]-before[0])) > 0.01:
						return fmt.Errorf("the members were charged %v and %v: want the second %d times the first", after[0]-before[0], after[1]-before[1], secondWeight)
					}
					return nil
				}
				require.NoError(t, redistest.Poll(20*time.Second, check))
				faultlab.CleanUp(t, client, job.Prefix)
			})
		}
	}
}

func keys(set map[int]bool) []int { return slices.Sorted(maps.Keys(set)) }

package faultlab

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
)

// jobEnv is the environment variable with the job of a process that StartProcess starts.
const jobEnv = "TOKENBUCKET_FAULTLAB_JOB"

// Job is what one process of a fleet does: callers that each ask for permits, wait until they are due and use them, again and
// again. A bursty bucket, whose initial permits are all of its burst, or one that warms up.
type Job struct {
	// Addrs of a server, of a cluster's nodes (Cluster), or of sentinels (Sentinel: the name of their master).
	Addrs    []string
	Cluster  bool
	Sentinel string
	// Prefix of the keys, default "tokenbucket:"; Bucket is the limiter's name; Store is "script" or "lock".
	Prefix, Bucket, Store string
	// Rate is in permits per second; Burst is the most permits stored.
	Rate, Burst float64
	// Version of the configuration; with one, the bucket's state is kept for a day.
	Version int64
	// Warmup is the warm-up period, with PayNow and without a Burst; 0 for a bursty bucket.
	Warmup  time.Duration
	Callers int
	// Verb is the call that the callers make: "reserve" (TryReserve), the default, "try" (TryAcquire) or "acquire" (Acquire). Permits is
	// the number of permits of a call, default 1.
	Verb    string
	Permits int
	// Priority of the callers. Besides them, Higher callers of Normal in the same process acquire a permit again and again, each at
	// random times about HigherEvery apart; with HigherEvery 0 at once.
	Priority    tokenbucket.Priority
	Higher      int
	HigherEvery time.Duration
	// Tenants are the weights of tenants, among which the callers are divided in turn (WithFairness); nil for none.
	Tenants []int
	// Spread is the time over which the callers begin, one after another.
	Spread time.Duration
	// Timeout of a reservation or a try. Pause is how long a caller waits after a failure, and at most after a refusal; default 20 ms.
	Timeout, Pause time.Duration
	// StoreTimeout is the limiter's store timeout; default that of the library.
	StoreTimeout time.Duration
	// Skew is by how much the clock of the process is off: the first, and after every 100 ms the next, round and round. The
	// limiter is given such a clock (WithClock), whose timers and differences are right: what steps is a machine's wall
	// clock, not the time that passes. See Clock for why it is not the process' own.
	Skew []time.Duration
	// Preload is more of the environment, as "NAME=value".
	Preload []string
}

// Permit is one request whose permits were used, or one failure; of a try a refusal, too. Times are by Micros. The server's time
// of the decision is not to be had from outside of the library. Of a try and an acquire only Asked and Used are known: Granted,
// Told and Due are as Used, Way is 0, and Woken is from when the process began.
type Permit struct {
	// Permits is the number of permits of the request.
	Permits int
	// Asked is when the caller made the call, Granted when it had the result: the decision lies between.
	Asked, Granted int64
	// Told is Asked plus the wait in the reply. Due is Asked plus the actual wait: shorter if a waiter ahead gave up, longer if the bucket
	// was held back, or if the process was woken so late that its callers asked again. Neither is later than the permit was due, except by
	// Way.
	Told, Due int64
	// Way is by how much the decision may have been before Asked, see Trips.
	Way int64
	// Used is when the caller was woken, or failed. Used − Due is at most its lateness, and exact except for the time from Asked to the
	// decision.
	Used int64
	// Woken is the largest lateness with which the process woke a sleeper without the library, from Granted to Used.
	Woken int64
	// Priority of the caller.
	Priority tokenbucket.Priority
	// Tenant of the caller: an index in Job.Tenants.
	Tenant int
	// Refused reports that a try was refused, at the time Used.
	Refused bool
	// Err is what failed, "" if nothing did; Kind is it in a word: unavailable, timeout, lock, corrupt,
	// config, other; stuck: the process was to end and had been waiting for ten seconds longer than its timeout since.
	Err, Kind string
}

// used reports whether the permits were used.
func (p *Permit) used() bool { return p.Err == "" && !p.Refused }

// Process is a process of a fleet. Its methods are safe for concurrent use.
type Process struct {
	Pid int
	w   *worker.Worker[Permit]
}

// StartProcess starts a process that does the job until End, and no longer than the test. The package's TestMain must call
// Main:
//
//	func TestMain(m *testing.M) {
//		faultlab.Main()
//		os.Exit(m.Run())
//	}
func StartProcess(t testing.TB, job Job) *Process {
	t.Helper()
	w := worker.Start[Permit](t, jobEnv, job, job.Preload...)
	return &Process{w.Pid, w}
}

// Stopped returns nil once the process is stopped, which takes the kernel a moment.
func Stopped(pid int) error {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return err
	}
	if state := stat[bytes.LastIndexByte(stat, ')')+2]; state != 'T' {
		return fmt.Errorf("process %d is in state %c, not stopped", pid, state)
	}
	return nil
}

// Stop makes the process hang (SIGSTOP) until Continue.
func (p *Process) Stop() error { return p.w.Stop() }

// Continue ends Stop.
func (p *Process) Continue() error { return p.w.Continue() }

// Kill kills the process (SIGKILL).
func (p *Process) Kill() error { return p.w.Kill() }

// Permits returns permits and failures so far.
func (p *Process) Permits() []Permit { return p.w.Events() }

// End waits until the callers have finished their calls, ends the process and returns all permits and failures. A killed process returns
// those up to then, except the ones that were just granted.
func (p *Process) End() []Permit { return p.w.End() }

// Fleet is several processes with jobs that may differ.
type Fleet []*Process

// StartFleet starts a process for each job.
func StartFleet(t testing.TB, jobs ...Job) Fleet {
	t.Helper()
	var f Fleet
	for _, j := range jobs {
		f = append(f, StartProcess(t, j))
	}
	return f
}

// Permits returns the permits and failures of all processes so far.
func (f Fleet) Permits() (all []Permit) {
	for _, p := range f {
		all = append(all, p.Permits()...)
	}
	return all
}

// End ends all processes at the same time, and returns their permits and failures.
func (f Fleet) End() (all []Permit) {
	told := make([][]Permit, len(f))
	var ending sync.WaitGroup
	for i, p := range f {
		ending.Go(func() { told[i] = p.End() })
	}
	ending.Wait()
	return slices.Concat(told...)
}

// Used returns the permits that were used, as events for Worst, without failures and refusals.
func Used(permits []Permit) (events []Event) {
	for _, p := range permits {
		if p.used() {
			events = append(events, Event{p.Used, p.Permits})
		}
	}
	return events
}

// Failures counts failures by kind.
func Failures(permits []Permit) map[string]int {
	kinds := map[string]int{}
	for _, p := range permits {
		if p.Err != "" {
			kinds[p.Kind]++
		}
	}
	return kinds
}

// Due returns when the permits that were used were due, as spans for Surely, by the server's clock. A span begins at the earliest possible
// decision plus the wait. It ends at the reply plus the wait, or when the caller was woken.
func Due(permits []Permit) (spans []Span) {
	for _, p := range permits {
		if p.used() {
			to := min(p.Used, p.Due-p.Asked+p.Granted)
			spans = append(spans, Span{min(p.Due-p.Way, to), to})
		}
	}
	return spans
}

// MostWoken returns the largest lateness with which any of the processes woke a sleeper while a caller waited.
func MostWoken(permits []Permit) (most time.Duration) {
	for _, p := range permits {
		most = max(most, time.Duration(p.Woken)*time.Microsecond)
	}
	return most
}

// MostLate returns by how much, at most, a caller waited longer than the reply said, from its arrival on. The way of the reply counts as
// lateness, too.
func MostLate(permits []Permit) (most time.Duration) {
	for _, p := range permits {
		if p.used() {
			most = max(most, time.Duration(p.Used-p.Granted-(p.Due-p.Asked))*time.Microsecond)
		}
	}
	return most
}

// MostPutOff returns by how much, at most, a wait was prolonged after the reply. More than 100 ms of it, without a penalty, show a process
// that was woken late: the permits of its callers are taken and not used.
func MostPutOff(permits []Permit) (most time.Duration) {
	for _, p := range permits {
		if p.used() {
			most = max(most, time.Duration(p.Due-p.Told)*time.Microsecond)
		}
	}
	return most
}

// MayLapse reports whether permits may have lapsed unused: a caller whose reply, or whose awakening, comes more than 100 ms after the due
// time takes another permit.
func MayLapse(permits []Permit) bool {
	return MostPutOff(permits) > 50*time.Millisecond || slices.ContainsFunc(permits, func(p Permit) bool { return p.Way >= longestWay.Microseconds() })
}

// Main does the job and exits, if this process is one that StartProcess has started. See worker.Main.
func Main() { worker.Main(jobEnv, work) }

// Parallel lets n tests run at once, on any number of processors, unless the command line sets another number. It is for tests that wait
// most of the time. A package's TestMain calls it.
func Parallel(n int) {
	flag.Parse()
	asked := false
	flag.Visit(func(f *flag.Flag) { asked = asked || f.Name == "test.parallel" })
	if asked {
		return
	}
	if err := flag.Set("test.parallel", strconv.Itoa(n)); err != nil {
		panic(err)
	}
}

// Client returns a client of the job's servers. The caller closes it.
func (j *Job) Client() redis.UniversalClient {
	switch {
	case j.Sentinel != "":
		return redis.NewFailoverClient(&redis.FailoverOptions{MasterName: j.Sentinel, SentinelAddrs: j.Addrs})
	case j.Cluster:
		return redis.NewClusterClient(&redis.ClusterOptions{Addrs: j.Addrs})
	}
	return redis.NewClient(&redis.Options{Addr: j.Addrs[0]})
}

// Limiter returns a limiter of the job's bucket with that client.
func (j *Job) Limiter(client redis.UniversalClient, more ...tokenbucket.Option) (*tokenbucket.RateLimiter, error) {
	prefix := tokenbucket.WithKeyPrefix(j.prefix())
	store := Stores[j.Store]
	if store == nil {
		return nil, fmt.Errorf("store %q: want one of %q", j.Store, Kinds)
	}
	opts := []tokenbucket.Option{tokenbucket.WithStore(store(client, prefix)), tokenbucket.WithPriority(j.Priority)}
	if j.StoreTimeout > 0 {
		opts = append(opts, tokenbucket.WithStoreTimeout(j.StoreTimeout))
	}
	if len(j.Skew) > 0 {
		opts = append(opts, tokenbucket.WithClock(Skewed(j.Skew...)))
	}
	if j.Version > 0 {
		opts = append(opts, tokenbucket.WithVersion(j.Version))
	}
	opts = append(append(opts, j.fair()...), more...)
	if j.Warmup > 0 {
		return tokenbucket.NewSmoothWarmingUp(j.Bucket, j.Rate, j.Warmup, append(opts, tokenbucket.WithPayment(tokenbucket.PayNow))...)
	}
	opts = append(opts, tokenbucket.WithMaxPermits(j.Burst), tokenbucket.WithInitialPermits(j.Burst))
	return tokenbucket.NewSmoothBursty(j.Bucket, j.Rate, opts...)
}

func (j *Job) prefix() string {
	if j.Prefix == "" {
		return "tokenbucket:"
	}
	return j.Prefix
}

// work is the process.
func work(ctx context.Context, j *Job, tell func(Permit)) error {
	client := j.Client()
	defer func() { _ = client.Close() }()
	trips := Trips{Now: Micros}
	limiter, err := j.Limiter(client, tokenbucket.WithObserver(tokenbucket.Observer{Trip: trips.Note}))
	if err != nil {
		return err
	}
	late := StartLateness()
	defer late.Stop()
	w := &working{job: j, limiter: limiter, trips: &trips, late: late, stuck: make(chan struct{})}
	if w.job.Permits == 0 {
		w.job.Permits = 1
	}
	pause := j.Pause
	if pause == 0 {
		pause = 20 * time.Millisecond
	}
	call := map[string]func(context.Context) (Permit, time.Duration){"": w.reserve, "reserve": w.reserve, "try": w.try, "acquire": w.acquire}[j.Verb]
	if call == nil {
		return fmt.Errorf("verb %q: want reserve, try or acquire", j.Verb)
	}
	context.AfterFunc(ctx, func() { time.AfterFunc(j.Timeout+10*time.Second, func() { close(w.stuck) }) })
	var callers sync.WaitGroup
	for i := range j.Callers {
		callers.Go(func() {
			rest(ctx, j.Spread*time.Duration(i)/time.Duration(j.Callers))
			for ctx.Err() == nil {
				p, again := call(j.as(ctx, i))
				if p.Used != 0 {
					p.Tenant = i % max(1, len(j.Tenants))
					tell(p)
				}
				rest(ctx, min(pause, again))
			}
		})
	}
	for range j.Higher {
		higher := &working{job: j, limiter: limiter.ForPriority(tokenbucket.Normal), trips: &trips, late: late, stuck: w.stuck}
		callers.Go(func() {
			for rest(ctx, higher.pause()); ctx.Err() == nil; rest(ctx, higher.pause()) {
				if p, _ := higher.acquire(ctx); p.Used != 0 {
					tell(p)
				}
			}
		})
	}
	callers.Wait()
	return nil
}

// pause returns how long a caller of the higher priority rests before its next call.
func (w *working) pause() time.Duration {
	return time.Duration((0.5 + rand.Float64()) * float64(w.job.HigherEvery))
}

// working is a process at work. Its verbs make one call. They return the event to send, none if Used is 0, and how soon it makes sense to
// ask again.
type working struct {
	job     *Job
	limiter *tokenbucket.RateLimiter
	trips   *Trips
	late    *Lateness
	stuck   chan struct{} // closed long after the process was to end
}

// reserve lets what it has begun end, when the process is to end.
func (w *working) reserve(context.Context) (p Permit, again time.Duration) {
	p = Permit{Permits: w.job.Permits, Asked: Micros()}
	r, err := w.limiter.TryReserve(context.Background(), p.Permits, w.job.Timeout)
	p.Granted = Micros()
	granted := time.Now()
	switch {
	case err != nil:
		p.Told, p.Due, p.Used, p.Err, p.Kind = p.Asked, p.Asked, p.Granted, err.Error(), kind(err)
		return p, time.Hour
	case !r.OK():
		return p, r.RetryAfter()
	}
	p.Told, p.Way = p.Asked+r.Delay().Microseconds(), w.trips.Way(p.Asked)
	select {
	case <-r.Ready():
	case <-w.stuck:
		p.Err, p.Kind = fmt.Sprintf("still waits, for %v when it was granted", r.Delay()), "stuck"
	}
	p.Used = Micros()
	p.Woken = w.late.Since(granted).Microseconds()
	p.Due = p.Asked + r.Delay().Microseconds()
	if p.Due > p.Told { // it was asked again
		p.Way = max(p.Way, w.trips.Way(p.Asked))
	}
	return p, 0
}

// try gives up when the process is to end.
func (w *working) try(ctx context.Context) (Permit, time.Duration) {
	asked := Micros()
	ok, err := w.limiter.TryAcquire(ctx, w.job.Permits, w.job.Timeout)
	return w.returned(ctx, asked, ok, err)
}

// acquire gives up when the process is to end.
func (w *working) acquire(ctx context.Context) (Permit, time.Duration) {
	asked := Micros()
	_, err := w.limiter.Acquire(ctx, w.job.Permits)
	return w.returned(ctx, asked, true, err)
}

func (w *working) returned(ctx context.Context, asked int64, ok bool, err error) (p Permit, again time.Duration) {
	if ctx.Err() != nil {
		return p, 0
	}
	now := Micros()
	p = Permit{Permits: w.job.Permits, Asked: asked, Granted: now, Told: now, Due: now, Used: now, Priority: w.limiter.Priority()}
	switch {
	case err != nil:
		p.Err, p.Kind = err.Error(), kind(err)
		return p, time.Hour
	case !ok:
		p.Refused = true
		return p, time.Hour
	}
	p.Woken = w.late.Most().Microseconds()
	return p, 0
}

// longestWay is for how long the library believes that a time has surely come, and how late a permit may be used.
const longestWay = 100 * time.Millisecond

// Trips records the last replies of a store, for an Observer. A decision may be as of a time that had surely come when the request left:
// the time in the last reply, plus the time since its arrival. So it may precede the request by the duration of that reply's trip, but by
// no more than longestWay.
type Trips struct {
	// Now is the clock, in microseconds.
	Now func() int64

	mu   sync.Mutex
	last []Span // in the order of their ends
	n    int    // answers
}

// Answers is how many there were. A call during which there was none was answered by what the process owned.
func (t *Trips) Answers() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.n
}

// Note is called when an answer has come.
func (t *Trips) Note(trip tokenbucket.Trip) {
	if trip.Err != nil {
		return
	}
	const kept = 64
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.Now()
	t.n++
	t.last = append(t.last[max(0, len(t.last)+1-kept):], Span{now - trip.Elapsed.Microseconds(), now})
}

// Way returns by how much, in microseconds, the decision about a call made at a time, and answered since, may precede it.
func (t *Trips) Way(asked int64) (most int64) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, l := range slices.Backward(t.last) {
		if most = max(most, l.To-l.From); l.To < asked {
			break
		}
	}
	return min(most, longestWay.Microseconds())
}

// rest sleeps, unless the context ends.
func rest(ctx context.Context, d time.Duration) {
	if d <= 0 {
		return
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// kind is an error in a word.
func kind(err error) string {
	for _, k := range []struct {
		err  error
		name string
	}{
		{tokenbucket.ErrStoreUnavailable, "unavailable"}, {tokenbucket.ErrLockNotObtained, "lock"},
		{tokenbucket.ErrStoreTimeout, "timeout"}, {tokenbucket.ErrCorruptState, "corrupt"}, {tokenbucket.ErrInvalidConfig, "config"},
	} {
		if errors.Is(err, k.err) {
			return k.name
		}
	}
	return "other"
}

// Skewed returns a clock whose wall time is off by the first duration, and after every 100 ms by the next, round and round.
// Its timers and Since are the system's monotonic ones, as on a machine whose wall clock is wrong.
func Skewed(by ...time.Duration) clockwork.Clock {
	return &skewed{clockwork.NewRealClock(), time.Now(), by}
}

type skewed struct {
	clockwork.Clock
	origin time.Time
	by     []time.Duration
}

// Now implements clockwork.Clock.
func (s *skewed) Now() time.Time {
	now := time.Now()
	return now.Round(0).Add(s.by[int(now.Sub(s.origin)/(100*time.Millisecond))%len(s.by)])
}

// Until implements clockwork.Clock.
func (s *skewed) Until(t time.Time) time.Duration { return t.Sub(s.Now()) }

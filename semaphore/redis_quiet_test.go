package semaphore_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// quietState is the field quiet, see lua/apply.lua.
type quietState struct {
	Limit, Version, Lives, Ticket, Fence, Seen, Used, First float64
	Processes, Holders                                      []quietItem
}

type quietItem struct {
	names   []string
	numbers []float64
}

func quietOf(t *testing.T, client *redis.Client, state string) *quietState {
	text := client.HGet(ctx, state, "quiet").Val()
	if text == "" {
		return nil
	}
	q := new(quietState)
	numbers := func(into ...*float64) {
		for _, n := range into {
			*n = math.Float64frombits(binary.LittleEndian.Uint64([]byte(text[:8])))
			text = text[8:]
		}
	}
	numbers(q.head()...)
	for text != "" {
		list, names := &q.Holders, make([]string, 2)
		item := quietItem{numbers: make([]float64, 4)}
		rest, isHolder := strings.CutPrefix(text, "\nholder ")
		if !isHolder {
			list, names, item.numbers = &q.Processes, names[:1], item.numbers[:2]
			rest, isHolder = strings.CutPrefix(text, "\nprocess ")
			require.True(t, isHolder, "%q", text)
		}
		for i := range names {
			names[i], rest, _ = strings.Cut(rest, "\x00")
		}
		text, item.names = rest, names
		for i := range item.numbers {
			numbers(&item.numbers[i])
		}
		*list = append(*list, item)
	}
	return q
}

func (q *quietState) head() []*float64 {
	return []*float64{&q.Limit, &q.Version, &q.Lives, &q.Ticket, &q.Fence, &q.Seen, &q.Used, &q.First}
}

func (q *quietState) store(t *testing.T, client *redis.Client, state string) {
	var b []byte
	number := func(n float64) { b = binary.LittleEndian.AppendUint64(b, math.Float64bits(n)) }
	for _, n := range q.head() {
		number(*n)
	}
	add := func(prefix string, all []quietItem) {
		for _, item := range all {
			b = append(b, prefix+strings.Join(item.names, "\x00")+"\x00"...)
			for _, n := range item.numbers {
				number(n)
			}
		}
	}
	add("\nprocess ", q.Processes)
	add("\nholder ", q.Holders)
	require.NoError(t, client.HSet(ctx, state, "quiet", b).Err())
}

// shift moves the times of the state.
func (q *quietState) shift(micros float64) {
	q.Seen += micros
	if q.First != 0 {
		q.First += micros
	}
	for _, p := range q.Processes {
		p.numbers[0] += micros
	}
	for _, h := range q.Holders {
		h.numbers[1] += micros
	}
}

// A batch of a lone caller takes three commands once there is a state.
func TestLoneCallerTakesThreeCommands(t *testing.T) {
	client := redistest.Start(t).Client(t)
	s := openRedis(t, client, 4)()
	once := func() {
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		require.NoError(t, p.Release(ctx))
	}
	once()
	once()
	require.NoError(t, client.ConfigResetStat(ctx).Err())
	const rounds = 20
	for range rounds {
		once()
		_, err := s.TryAcquire(ctx, 5, 0)
		require.ErrorIs(t, err, semaphore.ErrTooMany)
	}
	info, err := client.Info(ctx, "commandstats").Result()
	require.NoError(t, err)
	calls := map[string]int{}
	for _, line := range strings.Split(info, "\r\n") {
		if name, rest, ok := strings.Cut(strings.TrimPrefix(line, "cmdstat_"), ":calls="); ok {
			n, _, _ := strings.Cut(rest, ",")
			calls[name], err = strconv.Atoi(n)
			require.NoError(t, err)
		}
	}
	delete(calls, "config|resetstat")
	require.Equal(t, map[string]int{"evalsha": 3 * rounds, "time": 3 * rounds, "hget": 3 * rounds, "hset": 3 * rounds}, calls)
}

// Other processes find the permits of a lone caller, although their batches change the format of the state. When it is quiet again, the lone
// caller finds theirs.
func TestQuietAndBusy(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	process := openRedis(t, client, 3, semaphore.WithLease(time.Hour)) // so that no renewal is due during the test
	a, b := process().Labelled("a"), process().Labelled("b")
	var held []*semaphore.Permit
	for range 2 {
		p, err := a.Acquire(ctx, 1)
		require.NoError(t, err)
		held = append(held, p)
	}
	state := keyOf(t, client, "state")
	queue := strings.TrimSuffix(state, "state") + "queue"
	require.NotNil(t, quietOf(t, client, state))
	before, err := a.Holders(ctx)
	require.NoError(t, err)
	require.Len(t, before, 2)
	for i, h := range before {
		require.Equal(t, held[i].ID(), h.ID)
		require.Equal(t, held[i].Fence(), h.Fence)
		require.Equal(t, "a", h.Label)
		require.WithinDuration(t, h.Since.Add(time.Hour), h.Expires, 0)
	}
	stats := func(want semaphore.Stats) {
		t.Helper()
		got, err := a.Stats(ctx)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	stats(semaphore.Stats{Permits: 3, Used: 2})

	waits := make(chan *semaphore.Permit)
	go func() {
		p, err := b.Acquire(ctx, 2)
		if err != nil {
			t.Error(err)
		}
		waits <- p
	}()
	require.Eventually(t, func() bool { return client.ZCard(ctx, queue).Val() == 1 }, 20*time.Second, time.Millisecond)
	require.Nil(t, quietOf(t, client, state))
	after, err := b.Holders(ctx)
	require.NoError(t, err)
	require.Equal(t, before, after)
	stats(semaphore.Stats{Permits: 3, Used: 2, Waiting: 1})
	_, err = a.TryAcquire(ctx, 1, 0)
	require.ErrorIs(t, err, semaphore.ErrRefused, "b is before it in the queue")
	require.NoError(t, held[0].Release(ctx))
	p := <-waits
	require.Greater(t, p.Fence(), held[1].Fence())

	require.Eventually(t, func() bool { // a second after the last wait
		_, err := a.TryAcquire(ctx, 1, 0)
		require.ErrorIs(t, err, semaphore.ErrRefused)
		return quietOf(t, client, state) != nil
	}, 30*time.Second, 100*time.Millisecond)
	require.EqualValues(t, 1, client.Exists(ctx, state, strings.TrimSuffix(state, "state")+"held", strings.TrimSuffix(state, "state")+"info",
		queue, strings.TrimSuffix(state, "state")+"procs", strings.TrimSuffix(state, "state")+"idle").Val(), "and nothing else")
	stats(semaphore.Stats{Permits: 3, Used: 3})
	after, err = b.Holders(ctx)
	require.NoError(t, err)
	require.Len(t, after, 2)
	require.Equal(t, before[1], after[0])
	require.Equal(t, p.Fence(), after[1].Fence)
	require.NoError(t, held[1].Release(ctx))
	require.NoError(t, p.Release(ctx))
	stats(semaphore.Stats{Permits: 3})
}

// A state of format 2 from an earlier release is decoded, also one that its lone caller left behind.
func TestFormat2(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	name := fmt.Sprint("format2-", time.Now().UnixNano())
	s, err := semaphore.NewRedis(client, name, 2)
	require.NoError(t, err)
	b := semaphore.StoreOf(s)
	base := "semaphore:{" + name + "}:"
	now := time.Now().UnixMicro()
	expires := now + time.Hour.Microseconds()
	require.NoError(t, client.HSet(ctx, base+"state", "fence", now, "ticket", 7, "used", 2, "seen", now, "permits", "2 2 5",
		"lives", now+48*time.Hour.Microseconds(), "solo", fmt.Sprint(expires, " old ", now+time.Minute.Microseconds(), " 3")).Err())
	require.NoError(t, client.ZAdd(ctx, base+"held", redis.Z{Score: float64(expires), Member: "old-1"}).Err())
	require.NoError(t, client.HSet(ctx, base+"info", "old-1", fmt.Sprintf("2 old %d %d its label", now, now)).Err())
	r, err := b.Apply(ctx, &store.Batch{Process: "old", LeaseMicros: 1e6, Permits: 1, Enter: []store.Entry{{ID: "new", Permits: 1}}})
	require.NoError(t, err)
	require.False(t, r.Fresh)
	require.EqualValues(t, 3, r.Notified)
	require.Equal(t, store.Limit{Permits: 2, Version: 5}, r.Limit)
	require.Equal(t, store.Refused, r.Entered[0].Outcome)
	held, err := b.Holders(ctx)
	require.NoError(t, err)
	require.Equal(t, []store.Holder{{ID: "old-1", Permits: 2, Fence: now, Since: time.UnixMicro(now), Expires: time.UnixMicro(expires), Label: "its label"}}, held)
	require.Equal(t, "3 2 5", client.HGet(ctx, base+"state", "permits").Val(), "an older release must not accept it")
	require.NotNil(t, quietOf(t, client, base+"state"))
	require.False(t, client.HExists(ctx, base+"state", "solo").Val())
}

// A corrupt field is an ErrCorruptState, wherever it is cut or changed.
func TestCorruptQuietState(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	s := openRedis(t, client, 3)()
	b := semaphore.StoreOf(s)
	apply := func(e ...store.Entry) error {
		_, err := b.Apply(ctx, &store.Batch{Process: "p", LeaseMicros: 1e9, PatienceMicros: 1e9, Permits: 3, Enter: e})
		return err
	}
	require.NoError(t, apply(store.Entry{ID: "a", Permits: 1}))
	require.NoError(t, apply(store.Entry{ID: "b", Permits: 1, Label: "label"}))
	state := keyOf(t, client, "state")
	good := client.HGet(ctx, state, "quiet").Val()
	check := func(bad string) {
		t.Helper()
		require.NoError(t, client.HSet(ctx, state, "quiet", bad).Err())
		_, err := b.Holders(ctx)
		require.ErrorIs(t, err, semaphore.ErrCorruptState, "%q", bad)
		_, err = b.Stats(ctx)
		require.ErrorIs(t, err, semaphore.ErrCorruptState, "%q", bad)
		err = apply(store.Entry{ID: "never"}) // lua/apply.lua decides it
		require.ErrorIs(t, err, semaphore.ErrCorruptState, "%q", bad)
		require.Equal(t, bad, client.HGet(ctx, state, "quiet").Val())
	}
	for n := range len(good) {
		if n == 64 || strings.HasPrefix(good[n:], "\nholder ") {
			continue
		}
		check(good[:n])
		for _, id := range []string{"a", "b", "c"} { // lua/quiet.lua may not read the field
			require.NoError(t, client.HSet(ctx, state, "quiet", good).Err())
			require.NoError(t, apply())
			require.NoError(t, client.HSet(ctx, state, "quiet", good[:n]).Err())
			if err := apply(store.Entry{ID: id, Permits: 1}); err != nil {
				require.ErrorIs(t, err, semaphore.ErrCorruptState, "%q", good[:n])
			}
		}
	}
	for _, number := range []float64{math.NaN(), math.Inf(1), -1, 0.5, 1 << 54} {
		bits := binary.LittleEndian.AppendUint64(nil, math.Float64bits(number))
		for i := range 8 {
			check(good[:8*i] + string(bits) + good[8*i+8:])
		}
	}
	require.NoError(t, client.HSet(ctx, state, "quiet", good).Err())
	require.NoError(t, apply(store.Entry{ID: "c", Permits: 1}))
}

// A report has the end of the first lease also while no request waits, whichever of the other permits are released.
func TestEarliestWhileQuiet(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	b := semaphore.StoreOf(openRedis(t, client, 9)())
	apply := func(lease time.Duration, batch store.Batch) *store.Report {
		t.Helper()
		batch.Process, batch.LeaseMicros, batch.Permits = "p", lease.Microseconds(), 9
		r, err := b.Apply(ctx, &batch)
		require.NoError(t, err)
		require.NotNil(t, quietOf(t, client, keyOf(t, client, "state")))
		return r
	}
	ends := func(r *store.Report, lease time.Duration) int64 { return r.Now + lease.Microseconds() }
	enter := func(id string) store.Batch {
		return store.Batch{Enter: []store.Entry{{ID: id, Permits: 1}}}
	}
	apply(time.Minute, enter("first"))
	second := apply(2*time.Minute, enter("second"))
	third := apply(3*time.Minute, enter("third"))
	require.Less(t, third.Earliest, ends(second, 2*time.Minute))
	left := apply(time.Minute, store.Batch{Leave: []string{"first"}})
	require.Equal(t, ends(second, 2*time.Minute), left.Earliest)
	require.Equal(t, ends(third, 3*time.Minute), apply(time.Hour, store.Batch{Renew: []string{"second"}}).Earliest)
	fourth := apply(time.Minute, enter("fourth"))
	require.Equal(t, ends(fourth, time.Minute), fourth.Earliest)
	require.Zero(t, apply(time.Minute, store.Batch{Leave: []string{"second", "third", "fourth"}}).Earliest)
}

// After the clock was set back by an hour, the state does not stay in several keys for an hour.
func TestQuietAfterTheClockWentBack(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	s := openRedis(t, client, 1)()
	p, err := s.Acquire(ctx, 1)
	require.NoError(t, err)
	state := keyOf(t, client, "state")
	waiting := func(n int) {
		require.Eventually(t, func() bool {
			stats, err := s.Stats(ctx)
			return err == nil && stats.Waiting == n
		}, 20*time.Second, time.Millisecond)
	}
	leaves, leave := context.WithCancel(ctx)
	defer leave()
	left := make(chan error, 1)
	go func() { _, err := s.Acquire(leaves, 1); left <- err }()
	waiting(1)
	leave()
	require.ErrorIs(t, <-left, context.Canceled)
	waiting(0)
	require.Nil(t, quietOf(t, client, state))
	setBackRedis(t, client, strings.TrimSuffix(state, "state"), time.Hour.Microseconds())
	require.NoError(t, p.Release(ctx))
	require.Eventually(t, func() bool {
		p, err := s.Acquire(ctx, 1)
		require.NoError(t, err)
		require.NoError(t, p.Release(ctx))
		return quietOf(t, client, state) != nil
	}, 30*time.Second, 100*time.Millisecond)
}

// While a slot moves, lua/leases.lua ends and renews leases, and lua/pack.lua puts a state with waiters into one key. Holders keep their permits and
// fences. The process of a dropped waiter learns that it has to enter again.
func TestPackedWhileRequestsWait(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	name := fmt.Sprint(t.Name(), time.Now().UnixNano())
	s, err := semaphore.NewRedis(client, name, 2)
	require.NoError(t, err)
	st := semaphore.StoreOf(s)
	key := func(part string) string { return "semaphore:{" + name + "}:" + part }
	const second = 1_000_000
	apply := func(process string, b store.Batch) *store.Report {
		t.Helper()
		b.Process, b.Permits, b.LeaseMicros, b.PatienceMicros, b.AliveMicros = process, 2, 60*second, 60*second, 60*second
		r, err := st.Apply(ctx, &b)
		require.NoError(t, err)
		return r
	}
	enter := func(ids ...string) (b store.Batch) {
		for _, id := range ids {
			b.Enter = append(b.Enter, store.Entry{ID: id, Permits: 1, Wait: true})
		}
		return b
	}
	r := apply("one", enter("a", "b", "c"))
	require.Equal(t, store.Queued, r.Entered[2].Outcome)
	fence := r.Entered[1].Fence
	r = apply("one", store.Batch{})
	require.False(t, r.Fresh)
	was := client.ZScore(ctx, key("held"), "b").Val()

	reply, err := semaphore.LeasesScript.Run(ctx, client, 1, key("held"), "120000000", "3", "a", "c", "unknown", "b", "unknown")
	require.NoError(t, err)
	require.Equal(t, []string{"1", "0", "0", "1", "0"}, reply[1:])
	require.Zero(t, client.ZScore(ctx, key("held"), "a").Val())
	renewed := client.ZScore(ctx, key("held"), "b").Val()
	require.Greater(t, renewed, was+50*second)

	parts := []string{key("state"), key("held"), key("info"), key("queue"), key("procs")}
	reply, err = semaphore.PackScript.Run(ctx, client, len(parts), parts...)
	require.NoError(t, err)
	require.Equal(t, []string{"1"}, reply)
	require.Zero(t, client.Exists(ctx, parts[1:]...).Val())
	q := quietOf(t, client, key("state"))
	require.NotNil(t, q)
	require.Equal(t, []float64{1, renewed}, []float64{q.Used, q.First})
	holders, err := st.Holders(ctx)
	require.NoError(t, err)
	require.Len(t, holders, 1)
	require.Equal(t, "b", holders[0].ID)
	require.Equal(t, fence, holders[0].Fence)
	reply, err = semaphore.PackScript.Run(ctx, client, 1, parts[0])
	require.NoError(t, err)
	require.Empty(t, reply, "it is there already")

	r = apply("two", enter("d"))
	require.Equal(t, store.Granted, r.Entered[0].Outcome)
	require.Greater(t, r.Entered[0].Fence, fence)
	r = apply("one", store.Batch{Renew: []string{"b"}, Leave: []string{"a"}})
	require.True(t, r.Fresh, "c has to enter again")
	require.Equal(t, []bool{true}, r.Renewed)
	require.Equal(t, []store.Standing{store.Gone}, r.Left)
	require.Equal(t, store.Queued, apply("one", enter("c")).Entered[0].Outcome)
	apply("two", store.Batch{Leave: []string{"d"}})
	require.Equal(t, store.Granted, apply("one", enter("c")).Entered[0].Outcome)
}

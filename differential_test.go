package tokenbucket

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// drawRate draws rates from one in a quarter of an hour to ten million a second, round ones too.
func drawRate(t *rapid.T) float64 {
	if rapid.Bool().Draw(t, "round") {
		return rapid.SampledFrom([]float64{0.001, 0.1, 1, 3, 5, 7, 1000, 80_000, 3e6, 1e7}).Draw(t, "rate")
	}
	return math.Pow(10, rapid.Float64Range(-3, 7).Draw(t, "log rate"))
}

// drawMaxPermits draws what a bursty bucket may hold, and now and then what none may.
func drawMaxPermits(t *rapid.T) float64 {
	return rapid.OneOf(
		rapid.SampledFrom([]float64{0, math.Copysign(0, -1), 5e-324, 0.5, math.Nextafter(1, 0), 1, 5, 20, 1.0 / 3, maxExact}),
		rapid.Float64Range(0, 1e6),
		rapid.SampledFrom([]float64{-1, -5e-324, math.NaN(), math.Inf(1), math.Inf(-1), maxExact * 2}),
	).Draw(t, "max permits")
}

func drawConfig(t *rapid.T, kind kind) config {
	c := config{
		Kind:    kind,
		Payment: Payment(rapid.IntRange(0, 1).Draw(t, "payment")),
		Rate:    drawRate(t),
		Version: rapid.SampledFrom([]int64{0, 0, 1, 2, 3, maxExact - 1}).Draw(t, "version"),
	}
	if kind == warmingUp {
		c.WarmupMicros = rapid.Int64Range(1, 100_000_000).Draw(t, "warm-up")
		c.ColdFactor = rapid.Float64Range(1.01, 20).Draw(t, "cold factor")
		return c
	}
	c.Size = rapid.OneOf(rapid.SampledFrom([]float64{0, 0.5, 1, 5, 20}), rapid.Float64Range(0, 1e6)).Draw(t, "size")
	if c.Size >= 1 || rapid.Bool().Draw(t, "floor") {
		c.Floor = 1
	}
	return c
}

func drawRequest(t *rapid.T, places []place) request {
	switch op := rapid.IntRange(0, 9).Draw(t, "op"); {
	case op == 0 && rapid.Bool().Draw(t, "burst"):
		return request{Op: opSetRateAndBurst, Rate: drawRate(t), MaxPermits: drawMaxPermits(t)}
	case op == 0:
		return request{Op: opSetRate, Rate: drawRate(t)}
	case op == 1 && rapid.IntRange(0, 9).Draw(t, "reset") == 0:
		return request{Op: opReset}
	case op == 1 && rapid.Bool().Draw(t, "hold"):
		return request{Op: opHold, HoldMicros: rapid.Int64Range(1, rapid.SampledFrom([]int64{10, 1_000_000, 3_600_000_000}).Draw(t, "longest")).Draw(t, "micros")}
	case op == 2 && rapid.Bool().Draw(t, "stored"):
		return request{Op: opTakeStored, Permits: rapid.Int64Range(1, 1000).Draw(t, "permits")}
	case op <= 4 && len(places) > 0:
		p := rapid.SampledFrom(places[max(0, len(places)-3):]).Draw(t, "place")
		tail := rapid.SampledFrom([]int64{p.Prev, p.Tag}).Draw(t, "tail")
		return request{Op: opGiveBack, Back: giveBack{
			Epoch: p.Epoch, Tag: p.Tag, Tail: tail, Version: p.Version, ID: p.Tag, to: p.before, end: p.after.Next,
			spent: max(0, p.before.Stored-p.after.Stored), level: p.after.Stored, granted: p.before.Next,
		}}
	}
	return request{
		Op:            opTake,
		Permits:       rapid.OneOf(rapid.Int64Range(1, 20), rapid.Int64Range(1, maxExact)).Draw(t, "permits"),
		MaxWaitMicros: rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, 10_000_000), rapid.Just(int64(maxExact))).Draw(t, "wait"),
	}
}

// drawTime moves the clock on, lets it stand still, saw-tooth, and step far.
func drawTime(t *rapid.T, now int64) int64 {
	return now + rapid.OneOf(
		rapid.SampledFrom([]int64{0, 1, 333_333, 200_000}),
		rapid.Int64Range(0, 2_000_000),
		rapid.Int64Range(-2_100_000, 2_100_000),
		rapid.SampledFrom([]int64{-3_600_000_000, 3_600_000_000, 86_400_000_000}),
	).Draw(t, "step")
}

// pipeline sends batches to lua/apply.lua, many in one round trip, and none with a prediction.
type pipeline struct {
	redis.Pipeliner
	store *RedisScriptStore
}

// patientClient waits a minute for an answer: on a busy machine, a pipeline of hundreds of batches takes longer than the three
// seconds that are the default.
func patientClient(t *testing.T) *redis.Client {
	return redistest.Shared(t).Client(t, func(o *redis.Options) { o.ReadTimeout, o.WriteTimeout = time.Minute, time.Minute })
}

func newPipeline(t *testing.T, store *RedisScriptStore, client *redis.Client) pipeline {
	require.NoError(t, client.ScriptLoad(background, applyScript.Source).Err())
	return pipeline{client.Pipeline(), store}
}

// apply queues a batch. The answer is there after Exec.
func (p pipeline) apply(b *batch) (*attempt, script.Call) {
	a := &attempt{batch: b, cached: p.store.cacheOf(b)}
	args := make([]string, 2+headArgs+bucketArgs)
	args[0], args[1] = a.cached.bucket, a.cached.lock
	p.store.head(args[2:], p.store.clockArg(b), 0, "")
	a.encode(args[2+headArgs:], 0, "")
	call := applyScript.Call(background, false, 2, args)
	_ = p.Process(background, call)
	return a, call
}

// The script and PermitBucket.Apply must compute the same, to the last bit. Go decides a chain of batches, each on the
// state that the one before left. The script gets all of them in one pipeline, and every answer must be the text that Go
// wrote. Grants follow from the account, and each moves the state's seq, so equal states are equal answers.
//
// These are 25,000 batches in CI, and half of them elsewhere.
func TestDifferential(t *testing.T) {
	steps := sized(250, 125) // × rapid's 100 checks
	client := patientClient(t)
	pipe := newPipeline(t, NewRedisScriptStore(client, WithLocalTime(), WithKeyPrefix(fmt.Sprint(t.Name(), rand.Uint64(), ":"))), client)
	var chains, executed, granted, returned int
	rapid.Check(t, func(rt *rapid.T) {
		which := kind(rapid.IntRange(0, 1).Draw(rt, "kind"))
		configs := []config{drawConfig(rt, which), drawConfig(rt, which), drawConfig(rt, kind(rapid.IntRange(0, 1).Draw(rt, "other kind")))}
		configs = append(configs, configs[0], configs[0], configs[0], configs[0], configs[0])
		now := int64(1_700_000_000_000_000)
		chains++
		var places []place
		var want []string // the answers
		var calls []script.Call
		text := ""
		for range steps {
			now = drawTime(rt, now)
			at := now
			c := rapid.SampledFrom(configs).Draw(rt, "config")
			b := &batch{
				Name: fmt.Sprint(chains), config: c, Known: rapid.SampledFrom(configs).Draw(rt, "known"),
				Initial: rapid.Float64Range(0, max(c.Size, c.Floor)).Draw(rt, "initial"),
				Epoch:   rapid.Int64Range(1, maxExact).Draw(rt, "epoch"), LocalMicros: func() int64 { return at },
			}
			for range rapid.IntRange(0, 4).Draw(rt, "requests") {
				r := drawRequest(rt, places)
				for range rapid.SampledFrom([]int{1, 1, 1, 2, 17}).Draw(rt, "count") {
					b.Requests = append(b.Requests, r)
				}
			}
			_, call := pipe.apply(b)
			calls = append(calls, call)

			found := text
			var bucket PermitBucket
			require.NoError(rt, bucket.parse(found, nil))
			var out outcome
			err := bucket.apply(now, b, &out)
			written := ""
			switch {
			case errors.Is(err, ErrInvalidConfig): // a bucket of the other kind
			case err != nil:
				rt.Fatal(err)
			default:
				if out.Changed {
					state := bucket.appendText(nil)
					written = string(state)
					text = written
				}
				executed++
				for i := range b.Requests {
					if r := &b.Requests[i]; r.Grant.OK && r.Op == opTake {
						granted++
						places = append(places, r.Grant.Place)
					} else if r.Grant.OK && r.Op == opGiveBack {
						returned++
					}
				}
				places = places[max(0, len(places)-30):]
			}
			want = append(want, "decided\n"+found+"\n"+written)
		}
		_, err := pipe.Exec(background)
		require.NoError(rt, err)
		for i, call := range calls {
			if got := call.Val(); len(got) != 2 || got[1] != want[i] {
				rt.Fatalf("batch %d: Redis says %q, Go %q", i, got, want[i])
			}
		}
	})
	t.Logf("%d batches executed by Redis and by Go, %d takes granted, %d places given back", executed, granted, returned)
	require.Greater(t, executed, 80*steps, "batches that compared anything")
	require.Greater(t, granted, 80*steps)
	require.Greater(t, returned, 2*steps)
}

// A right prediction leaves the state that the script would have computed, to the last bit, and a wrong one changes nothing: a
// bucket whose process remembers it goes the same way as one that Go decides on from the text alone, which is what the
// script does (TestDifferential). On both stores, also when another process asks in between, when the state is lost, and
// when a clock is set back.
func TestGuess(t *testing.T) {
	steps := sized(60, 30) // × rapid's 100 checks, on each store
	client := redistest.Shared(t).Client(t)
	prefix := t.Name() + ":"
	var predictions, others atomic.Int64
	for which, predict := range redisStores(client, WithLocalTime(), WithKeyPrefix(prefix)) {
		t.Run(which, func(t *testing.T) {
			rapid.Check(t, func(rt *rapid.T) {
				c := drawConfig(rt, kind(rapid.IntRange(0, 1).Draw(rt, "kind")))
				s := newSetting(c)
				name := fmt.Sprint(rapid.StringMatching(`[a-z]{12}`).Draw(rt, "name"), rand.Uint64())
				now := int64(1_700_000_000_000_000)
				memos := []*cachedState{{}, {}}
				var places []place
				text := ""
				for range steps {
					if rapid.IntRange(0, 3).Draw(rt, "far") == 0 {
						now = drawTime(rt, now)
					} else {
						now += int64(rapid.Float64Range(0, 3).Draw(rt, "gap") * s.interval)
					}
					b := &batch{
						Name: name, config: c, Initial: rapid.Float64Range(0, max(c.Size, c.Floor)).Draw(rt, "initial"),
						Epoch: rapid.Int64Range(1, maxExact).Draw(rt, "epoch"), LocalMicros: func() int64 { return now }, own: &s,
					}
					for range rapid.IntRange(1, 3).Draw(rt, "requests") {
						r := request{Permits: rapid.Int64Range(1, 3).Draw(rt, "permits"), MaxWaitMicros: maxExact}
						if rapid.IntRange(0, 9).Draw(rt, "any") == 0 {
							r = drawRequest(rt, places)
						}
						b.Requests = append(b.Requests, r)
					}
					if rapid.IntRange(0, 40).Draw(rt, "lost") == 0 {
						require.NoError(rt, client.Del(background, prefix+"{"+name+"}").Err())
						text = ""
					}
					twin := *b
					twin.Requests = slices.Clone(b.Requests)
					m := memos[min(1, rapid.IntRange(0, 12).Draw(rt, "process")/12)]
					b.cached = m
					known := m.text
					out, err := apply(background, predict, b)
					require.NoError(rt, err)
					if out.local != 0 {
						predictions.Add(1)
						require.NotEmpty(rt, known)
					} else {
						others.Add(1)
					}
					var bucket PermitBucket
					require.NoError(rt, bucket.parse(text, nil))
					var want outcome
					require.NoError(rt, bucket.apply(now, &twin, &want))
					if want.Changed {
						state := bucket.appendText(nil)
						text = string(state)
					}
					require.Equal(rt, text, client.Get(background, prefix+"{"+name+"}").Val())
					require.Equal(rt, want.NowMicros, out.NowMicros)
					for i := range b.Requests {
						if twin.Requests[i].Grant != b.Requests[i].Grant {
							require.Equal(rt, twin.Requests[i].Grant, b.Requests[i].Grant)
						}
						if r := &b.Requests[i]; r.Grant.OK && r.Op == opTake {
							places = append(places, r.Grant.Place)
						}
					}
				}
			})
			t.Logf("%d right predictions, %d decided in full", predictions.Load(), others.Load())
			require.Greater(t, predictions.Swap(0), int64(500))
			require.Greater(t, others.Swap(0), int64(500))
		})
	}
}

// A prediction as of a time that the server has not reached, or left behind long ago, is not taken, nor while somebody else
// holds the lock: the batch is decided as if it had not been made.
func TestGuessClockAndLock(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := fmt.Sprint(t.Name(), rand.Uint64(), ":")
	for which, store := range redisStores(client, WithKeyPrefix(prefix), WithLockTTL(10*time.Second)) {
		t.Run(which, func(t *testing.T) {
			m := new(cachedState)
			var out outcome
			ask := func(skew, timeout time.Duration) error {
				b := takes(which, 1)
				b.config.Rate, b.config.Size, b.cached = 1e6, 1e9, m
				if out.ClockMicros != 0 {
					b.ServerMicros, b.ServerRead = out.ClockMicros+skew.Microseconds(), time.Now()
				}
				c, cancel := within(timeout)
				defer cancel()
				var err error
				out, err = apply(c, store, b)
				return err
			}
			predicts := func() { // soon, and rightly; on a busy machine a prediction may be too old when it comes to the server
				t.Helper()
				require.NoError(t, redistest.Poll(20*time.Second, func() error {
					err := ask(0, 5*time.Second)
					if err == nil && out.local == 0 {
						err = errors.New("no prediction, or a wrong one")
					}
					return err
				}))
			}
			predicts()
			for _, skew := range []time.Duration{time.Hour, time.Second, -time.Hour, -time.Second} {
				before := out
				require.NoError(t, ask(skew, 5*time.Second))
				require.Zero(t, out.local, skew)
				require.Equal(t, before.Bucket.Seq+1, out.Bucket.Seq)
				require.GreaterOrEqual(t, out.NowMicros, before.NowMicros)
				require.Less(t, out.NowMicros, before.NowMicros+5_000_000)
				predicts()
			}

			// A key that would not live long enough is prolonged, which a prediction does not do.
			require.NoError(t, client.PExpire(background, m.bucket, time.Hour).Err())
			m.expires = out.ClockMicros/1000 + time.Hour.Milliseconds()
			require.NoError(t, ask(0, 5*time.Second))
			require.Zero(t, out.local)
			require.Greater(t, client.PTTL(background, m.bucket).Val(), 24*time.Hour)
			predicts()

			state := client.Get(background, m.bucket).Val()
			require.NoError(t, client.Set(background, m.lock, "somebody", time.Minute).Err())
			require.NoError(t, redistest.Poll(20*time.Second, func() error {
				if err := ask(0, 100*time.Millisecond); !errors.Is(err, ErrLockNotObtained) {
					return fmt.Errorf("in 100 ms: %w", err)
				}
				return nil
			}))
			require.Equal(t, state, client.Get(background, m.bucket).Val())
			require.NoError(t, client.Del(background, m.lock).Err())
		})
	}
}

// What one language calls corrupt, the other does too, and nothing is overwritten.
func TestDifferentialCorrupt(t *testing.T) {
	client := patientClient(t)
	store := NewRedisScriptStore(client, WithLocalTime(), WithKeyPrefix(fmt.Sprint(t.Name(), rand.Uint64(), ":")))
	pipe := newPipeline(t, store, client)
	bucket, _ := store.keys("x")
	c := config{Rate: 5, Size: 5, Floor: 1}
	type answer struct {
		value string // of the key before
		*attempt
		call script.Call
		left *redis.StringCmd // of the key afterwards
	}
	var accepted, refused int
	rapid.Check(t, func(rt *rapid.T) {
		var all []answer
		var b PermitBucket
		batch := &batch{Name: "x", config: c, Initial: 1, Epoch: 7, LocalMicros: func() int64 { return 1_700_000_000_000_000 },
			Requests: []request{{Permits: 3, MaxWaitMicros: maxExact}}}
		if rapid.Bool().Draw(rt, "held") {
			batch.Requests = append(batch.Requests, request{Op: opHold, HoldMicros: 1_000_000})
		}
		err := b.apply(batch.LocalMicros(), batch, &batch.out)
		require.NoError(rt, err)
		text := b.appendText(nil)
		fields := strings.Split(string(text), " ")
		for range 100 {
			mutated := append([]string(nil), fields...)
			i := rapid.IntRange(0, len(fields)-1).Draw(rt, "field")
			key, _, _ := strings.Cut(mutated[i], "=")
			mutated[i] = key + "=" + rapid.SampledFrom([]string{"", "0", "1", "-1", "-0", "1e3", "1e999", "-1e999", "nan", "inf", "0x10", "1e308", "1e-9", "9.9e-10", "1e15", "1e16",
				".5", "5.", "+5", "1e", "--1", "1_0", "9007199254740992", "9007199254740993", "1e-400", "1.5", "now", "later", "warmup", "bursty", "1,2", "1,,2", "1:2", "-5:7", "1:0", ":1", "1:", "1:2:3", "1.5:2", "01", "1,", ",1", "1 ", "\x00", "\n"}).Draw(rt, "value")
			if rapid.IntRange(0, 9).Draw(rt, "cut") == 0 {
				mutated = mutated[:i]
			}
			value := strings.Join(mutated, " ")
			pipe.Set(background, bucket, value, time.Minute)
			a, call := pipe.apply(batch)
			all = append(all, answer{value, a, call, pipe.Get(background, bucket)})
		}
		_, err = pipe.Exec(background)
		require.NoError(rt, err)
		for _, a := range all {
			clock, err := parseReply(a.call.Val(), 1)
			require.NoError(rt, err)
			_, err = a.decode(clock, a.call.Val()[1])
			switch {
			case err == nil:
				accepted++
			case errors.Is(err, ErrCorruptState), errors.Is(err, ErrInvalidConfig):
				refused++
				require.Equal(rt, a.value, a.left.Val())
				require.Contains(rt, err.Error(), "x")
			default:
				rt.Fatal(err, a.value)
			}
			if a.value != "" {
				require.Equal(rt, errors.Is(err, ErrCorruptState), errors.Is(b.unmarshal(a.value), ErrCorruptState), a.value)
			}
		}
	})
	t.Logf("%d accepted, %d refused", accepted, refused)
	require.Greater(t, accepted, 100)
	require.Greater(t, refused, 1000)
}

// Permits come back as often as they are given back, in one epoch, and no place twice, however many were.
func TestManyReturns(t *testing.T) {
	store := NewRedisScriptStore(redistest.Shared(t).Client(t), WithLocalTime(), WithKeyPrefix(fmt.Sprint(t.Name(), rand.Uint64(), ":")))
	ask := func(requests ...request) *batch {
		b := &batch{Name: "x", config: config{Rate: 1, Size: 1000, Floor: 1}, Initial: 500, Epoch: newEpoch(),
			LocalMicros: func() int64 { return 1_700_000_000_000_000 }, Requests: requests}
		_, err := apply(background, store, b)
		require.NoError(t, err)
		return b
	}
	back := func(p place) request {
		return request{Op: opGiveBack, Back: giveBack{
			Epoch: p.Epoch, Tag: p.Tag, Tail: p.Prev, Version: p.Version, ID: p.Tag, to: p.before, end: p.after.Next,
			spent: p.before.Stored - p.after.Stored, level: p.after.Stored, granted: p.before.Next,
		}}
	}
	var places []place
	for i := range 4 * maxReturned {
		b := ask(request{Permits: 2}, request{Permits: 1})
		first, second := b.Requests[0].Grant.Place, b.Requests[1].Grant.Place
		places = append(places, first, second)
		if i%2 == 0 {
			first, second = second, first // the tail first, or out of turn
		}
		for _, r := range ask(back(first), back(second)).Requests {
			require.True(t, r.Grant.OK, "%d", i)
		}
	}
	state, err := apply(background, store, &batch{Name: "x", config: config{Rate: 1, Size: 1000, Floor: 1}, Epoch: 1, LocalMicros: func() int64 { return 1_700_000_000_000_000 }})
	require.NoError(t, err)
	require.Equal(t, 500.0, state.Bucket.StoredPermits)
	require.Len(t, state.Bucket.returned, maxReturned)
	for _, p := range places {
		require.False(t, ask(back(p)).Requests[0].Grant.OK, "a second time")
	}
}

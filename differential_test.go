package tokenbucket

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redisbucket"
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

func drawRequest(t *rapid.T, places []permit.Place) permit.Request {
	switch op := rapid.IntRange(0, 9).Draw(t, "op"); {
	case op == 0 && rapid.Bool().Draw(t, "burst"):
		return permit.Request{Op: permit.SetRateAndBurst, Rate: drawRate(t), MaxPermits: drawMaxPermits(t)}
	case op == 0:
		return permit.Request{Op: permit.SetRate, Rate: drawRate(t)}
	case op == 1 && rapid.IntRange(0, 9).Draw(t, "reset") == 0:
		return permit.Request{Op: rapid.SampledFrom([]permit.Op{permit.Reset, permit.Reset, permit.Reset, permit.ResetQuota}).Draw(t, "reset to")}
	case op == 1 && rapid.Bool().Draw(t, "hold"):
		return permit.Request{Op: permit.Hold, HoldMicros: rapid.Int64Range(1, rapid.SampledFrom([]int64{10, 1_000_000, 3_600_000_000}).Draw(t, "longest")).Draw(t, "micros")}
	case op == 2 && rapid.Bool().Draw(t, "stored"):
		return permit.Request{Op: permit.TakeStored, Permits: rapid.Int64Range(1, 1000).Draw(t, "permits")}
	case op == 2:
		of := permit.Origin{Epoch: rapid.Int64Range(1, maxExact).Draw(t, "epoch"), ID: 1}
		if len(places) > 0 {
			p := rapid.SampledFrom(places).Draw(t, "place")
			of = p.Origin()
			of.ID += rapid.SampledFrom([]int64{0, 0, 0, 1000}).Draw(t, "newer")
		}
		return permit.Request{Op: permit.Settle, Permits: rapid.OneOf(rapid.Int64Range(-20, 20), rapid.Int64Range(-maxExact, maxExact)).Draw(t, "settled"), Origin: of}
	case op <= 4 && len(places) > 0:
		p := rapid.SampledFrom(places[max(0, len(places)-3):]).Draw(t, "place")
		if rapid.IntRange(0, 2).Draw(t, "out of turn") == 0 {
			n := rapid.OneOf(rapid.Int64Range(1, 5), rapid.Int64Range(1, maxExact)).Draw(t, "permits")
			return permit.Request{Op: permit.GiveBack, Back: permit.OutOfTurn(p.Epoch, p.Version, p.ID, n, p.After, p.Returned)}
		}
		tail := rapid.SampledFrom([]int64{p.Prev, p.Tag}).Draw(t, "tail")
		return permit.Request{Op: permit.GiveBack, Back: permit.Refund{
			Epoch: p.Epoch, Tag: p.Tag, Tail: tail, Version: p.Version, ID: p.ID, To: p.Before, End: p.After.Next,
			Spent: max(0, p.Before.Stored-p.After.Stored), Level: p.After.Stored - p.Returned,
		}}
	}
	return permit.Request{
		Op:            permit.Take,
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

// patientClient waits a minute for an answer: a busy machine is no outage.
func patientClient(t *testing.T) *redis.Client {
	return redistest.Shared(t).Client(t, func(o *redis.Options) { o.ReadTimeout, o.WriteTimeout = time.Minute, time.Minute })
}

// answering is a client that notes the answers of scripts.
type answering struct {
	RedisClient
	answer []string // the last reply: the time, the decisions, and the time to live if the state was written
}

func (c *answering) Process(ctx context.Context, cmd redis.Cmder) error {
	c.answer = nil
	err := c.RedisClient.Process(ctx, cmd)
	if call, ok := cmd.(script.Call); ok && err == nil {
		c.answer = call.Val()
		call.SetVal(c.answer[:2])
	}
	return err
}

// ownLua is a client that has scripts run by a Lua of its own, see testdata/redis.lua.
type ownLua struct {
	redis.Scripter
	in  io.Writer
	out *bufio.Reader
}

func newOwnLua(t *testing.T, lua string) *ownLua {
	source := filepath.Join(t.TempDir(), "apply.lua")
	require.NoError(t, os.WriteFile(source, []byte(redisbucket.ApplyScript.Source), 0o600))
	process := exec.Command(redistest.Program(t, lua), "testdata/redis.lua", source)
	process.Stderr = os.Stderr
	in, err := process.StdinPipe()
	require.NoError(t, err)
	out, err := process.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, process.Start())
	t.Cleanup(func() {
		_ = in.Close()
		require.NoError(t, process.Wait())
	})
	return &ownLua{in: in, out: bufio.NewReader(out)}
}

func (c *ownLua) Process(_ context.Context, cmd redis.Cmder) error {
	call, args := cmd.(script.Call), cmd.Args()[3:]
	texts := []string{"2", strconv.Itoa(len(args) - 2)}
	for _, arg := range args {
		texts = append(texts, *arg.(*string))
	}
	var request bytes.Buffer
	for _, text := range texts {
		_, _ = fmt.Fprintf(&request, "%d\n%s\n", len(text), text)
	}
	if _, err := c.in.Write(request.Bytes()); err != nil {
		return err
	}
	var answer []string
	for range 3 {
		text, err := c.read()
		if err != nil {
			return err
		}
		answer = append(answer, text)
	}
	call.SetVal(answer)
	return nil
}

func (c *ownLua) read() (string, error) {
	var length int
	if _, err := fmt.Fscanf(c.out, "%d\n", &length); err != nil {
		return "", err
	}
	text := make([]byte, length+1)
	_, err := io.ReadFull(c.out, text)
	return string(text[:length]), err
}

// The script and PermitBucket.Apply must compute the same, to the last bit. Go decides a chain of batches, each on the
// state that the one before left, and so does the script: every answer must be the text that Go wrote. Grants follow from the account, and each moves the state's seq, so equal states are equal answers.
//
// These are 25,000 batches in CI, and half of them elsewhere.
func TestDifferential(t *testing.T) { differential(t, patientClient(t)) }

// The same under Lua 5.4, which servers other than Redis have: it has integers, and no global unpack.
func TestDifferentialLua54(t *testing.T) { differential(t, newOwnLua(t, "lua5.4")) }

func differential(t *testing.T, by RedisClient) {
	redistest.InOneGoroutine(t)
	client := &answering{RedisClient: by}
	store := NewRedisScriptStore(client, WithLocalTime(), WithKeyPrefix(fmt.Sprint(t.Name(), rand.Uint64(), ":")))
	steps := sized(250, 125) // × rapid's 100 checks
	var chains, executed, granted, returned, renewed, forgotten int
	rapid.Check(t, func(rt *rapid.T) {
		which := kind(rapid.IntRange(0, 1).Draw(rt, "kind"))
		configs := []config{drawConfig(rt, which), drawConfig(rt, which), drawConfig(rt, kind(rapid.IntRange(0, 1).Draw(rt, "other kind")))}
		configs = append(configs, configs[0], configs[0], configs[0], configs[0], configs[0])
		now := int64(1_700_000_000_000_000)
		chains++
		var places []permit.Place
		var last permit.Batch
		text := ""
		for range steps {
			now = drawTime(rt, now)
			at := now
			c := rapid.SampledFrom(configs).Draw(rt, "config")
			b := &permit.Batch{
				Name: fmt.Sprint(chains), Terms: termsOf(c), Known: termsOf(rapid.SampledFrom(configs).Draw(rt, "known")),
				Initial: rapid.OneOf(rapid.Float64Range(0, max(c.Size, c.Floor)), rapid.Just(max(c.Size, c.Floor))).Draw(rt, "initial"),
				Epoch:   rapid.Int64Range(1, maxExact).Draw(rt, "epoch"), LocalMicros: func() int64 { return at },
				Transient: rapid.Bool().Draw(rt, "transient"),
			}
			for range rapid.IntRange(0, 4).Draw(rt, "requests") {
				r := drawRequest(rt, places)
				for range rapid.SampledFrom([]int{1, 1, 1, 2, 17}).Draw(rt, "count") {
					b.Requests = append(b.Requests, r)
				}
			}
			if last.Epoch != 0 && rapid.IntRange(0, 9).Draw(rt, "arrives twice") == 0 {
				b.Epoch, b.Requests = last.Epoch, last.Requests
			}
			twin := *b
			twin.Requests = slices.Clone(b.Requests)
			last = permit.Batch{Epoch: b.Epoch, Requests: slices.Clone(b.Requests)}

			found := text
			var bucket PermitBucket
			require.NoError(rt, bucket.parse(found, nil))
			var out permit.Outcome
			err := bucket.apply(now, b, &out)
			written, ttl := "", ""
			switch {
			case errors.Is(err, ErrInvalidConfig): // a bucket of the other kind
			case err != nil:
				rt.Fatal(err)
			default:
				if out.Changed {
					state := bucket.appendText(nil)
					written = string(state)
					text = written
					millis, _ := bucket.ttlMillis(out.NowMicros, bucket.renewed(b))
					ttl = strconv.FormatInt(millis, 10)
					if bucket.renewed(b) {
						renewed++
						if bucket.Version > 0 || bucket.PausedMicros > 0 {
							forgotten++
						}
					}
				}
				executed++
				for i := range b.Requests {
					if r := &b.Requests[i]; r.Grant.OK && r.Op == permit.Take {
						granted++
						places = append(places, r.Grant.Place)
					} else if r.Grant.OK && r.Op == permit.GiveBack {
						returned++
					}
				}
				places = places[max(0, len(places)-30):]
			}
			_, scripted := apply(background, store, &twin)
			want := "decided\n" + found + "\n" + written
			if got := client.answer; len(got) < 2 || got[1] != want || len(got) > 2 && got[2] != ttl {
				rt.Fatalf("the script says %q, Go %q, kept for %s ms: %v", got, want, ttl, scripted)
			}
			if fmt.Sprint(scripted) != fmt.Sprint(err) {
				rt.Fatalf("%v with the script, %v without", scripted, err)
			}
		}
	})
	t.Logf("%d batches executed by the script and by Go, %d takes granted, %d places given back", executed, granted, returned)
	require.Greater(t, executed, 80*steps, "batches that compared anything")
	require.Greater(t, granted, 80*steps)
	require.Greater(t, returned, 2*steps)
	require.Greater(t, renewed, steps/2, "kept for a minute only")
	require.Greater(t, forgotten, steps/2, "though they had a version, or had been held back")
}

// A right prediction leaves the state that the script would have computed, to the last bit, and a wrong one changes nothing: a
// bucket whose process remembers it goes the same way as one that Go decides on from the text alone, which is what the
// script does (TestDifferential). On both stores, also when another process asks in between, when the state is lost, and
// when a clock is set back.
func TestGuess(t *testing.T) {
	redistest.InOneGoroutine(t)
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
				sessions := []*redisbucket.Session{{}, {}}
				var places []permit.Place
				text := ""
				for range steps {
					if rapid.IntRange(0, 3).Draw(rt, "far") == 0 {
						now = drawTime(rt, now)
					} else {
						now += int64(rapid.Float64Range(0, 3).Draw(rt, "gap") * s.interval)
					}
					b := &permit.Batch{
						Name: name, Terms: &s.terms, Initial: rapid.Float64Range(0, max(c.Size, c.Floor)).Draw(rt, "initial"),
						Epoch: rapid.Int64Range(1, maxExact).Draw(rt, "epoch"), LocalMicros: func() int64 { return now },
					}
					for range rapid.IntRange(1, 3).Draw(rt, "requests") {
						r := permit.Request{Permits: rapid.Int64Range(1, 3).Draw(rt, "permits"), MaxWaitMicros: maxExact}
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
					b.Session = sessions[min(1, rapid.IntRange(0, 12).Draw(rt, "process")/12)]
					out, err := apply(background, predict, b)
					require.NoError(rt, err)
					if out.Local != 0 {
						predictions.Add(1)
					} else {
						others.Add(1)
					}
					var bucket PermitBucket
					require.NoError(rt, bucket.parse(text, nil))
					var want permit.Outcome
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
						if r := &b.Requests[i]; r.Grant.OK && r.Op == permit.Take {
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

// A prediction for a time that the server has not reached, or passed long ago, is not written, nor while another client holds the lock. The
// batch is decided as without a prediction.
func TestGuessClockAndLock(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := fmt.Sprint(t.Name(), rand.Uint64(), ":")
	for which, store := range redisStores(client, WithKeyPrefix(prefix), WithLockTTL(10*time.Second)) {
		t.Run(which, func(t *testing.T) {
			m, bucket := new(redisbucket.Session), prefix+"{"+which+"}"
			var out decision
			permits := int64(1)
			ask := func(skew, timeout time.Duration) error {
				b := takes(which, permits)
				b.Terms, b.Session = termsOf(config{Rate: 1e6, Size: 1e9, Floor: 1}), m
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
					if err == nil && out.Local == 0 {
						err = errors.New("no prediction, or a wrong one")
					}
					return err
				}))
			}
			predicts()
			for _, skew := range []time.Duration{time.Hour, time.Second, -time.Hour, -time.Second} {
				before := out
				require.NoError(t, ask(skew, 5*time.Second))
				require.Zero(t, out.Local, skew)
				require.Equal(t, before.Bucket.Seq+1, out.Bucket.Seq)
				require.GreaterOrEqual(t, out.NowMicros, before.NowMicros)
				require.Less(t, out.NowMicros, before.NowMicros+5_000_000)
				predicts()
			}

			// A key that would not live long enough is prolonged, which a prediction does not do.
			left := client.PTTL(background, bucket).Val()
			permits = 1e10 // a debt of 10,000 s
			require.NoError(t, ask(0, 5*time.Second))
			require.Zero(t, out.Local)
			require.Greater(t, client.PTTL(background, bucket).Val(), left+2*time.Hour)
			permits = 1
			predicts()

			state := client.Get(background, bucket).Val()
			require.NoError(t, client.Set(background, bucket+":lock", "somebody", time.Minute).Err())
			require.NoError(t, redistest.Poll(20*time.Second, func() error {
				if err := ask(0, 100*time.Millisecond); !errors.Is(err, ErrLockNotObtained) {
					return fmt.Errorf("in 100 ms: %w", err)
				}
				return nil
			}))
			require.Equal(t, state, client.Get(background, bucket).Val())
			require.NoError(t, client.Del(background, bucket+":lock").Err())
		})
	}
}

// What one language calls corrupt, the other does too, and nothing is overwritten.
func TestDifferentialCorrupt(t *testing.T) {
	client := patientClient(t)
	store := NewRedisScriptStore(client, WithLocalTime(), WithKeyPrefix(fmt.Sprint(t.Name(), rand.Uint64(), ":")))
	bucket, _ := store.redis.Keys("x")
	c := config{Rate: 5, Size: 5, Floor: 1}
	var accepted, refused int
	rapid.Check(t, func(rt *rapid.T) {
		var b PermitBucket
		batch := &permit.Batch{Name: "x", Terms: termsOf(c), Initial: 1, Epoch: 7, LocalMicros: func() int64 { return 1_700_000_000_000_000 },
			Requests: []permit.Request{{Permits: 3, MaxWaitMicros: maxExact}}}
		if rapid.Bool().Draw(rt, "held") {
			batch.Requests = append(batch.Requests, permit.Request{Op: permit.Hold, HoldMicros: 1_000_000})
		}
		err := b.apply(batch.LocalMicros(), batch, &batch.Outcome)
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
			require.NoError(rt, client.Set(background, bucket, value, time.Minute).Err())
			_, err := apply(background, store, batch)
			switch {
			case err == nil:
				accepted++
			case errors.Is(err, ErrCorruptState), errors.Is(err, ErrInvalidConfig):
				refused++
				require.Equal(rt, value, client.Get(background, bucket).Val())
				require.Contains(rt, err.Error(), "x")
			default:
				rt.Fatal(err, value)
			}
			if value != "" {
				require.Equal(rt, errors.Is(err, ErrCorruptState), errors.Is(b.unmarshal(value), ErrCorruptState), value)
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
	ask := func(requests ...permit.Request) *permit.Batch {
		b := &permit.Batch{Name: "x", Terms: termsOf(config{Rate: 1, Size: 1000, Floor: 1}), Initial: 500, Epoch: engine.NewEpoch(),
			LocalMicros: func() int64 { return 1_700_000_000_000_000 }, Requests: requests}
		_, err := apply(background, store, b)
		require.NoError(t, err)
		return b
	}
	back := func(p permit.Place) permit.Request {
		return permit.Request{Op: permit.GiveBack, Back: permit.Refund{
			Epoch: p.Epoch, Tag: p.Tag, Tail: p.Prev, Version: p.Version, ID: p.ID, To: p.Before, End: p.After.Next,
			Spent: p.Before.Stored - p.After.Stored, Level: p.After.Stored - p.Returned,
		}}
	}
	var places []permit.Place
	for i := range 4 * maxReturned {
		b := ask(permit.Request{Permits: 2}, permit.Request{Permits: 1})
		first, second := b.Requests[0].Grant.Place, b.Requests[1].Grant.Place
		places = append(places, first, second)
		if i%2 == 0 {
			first, second = second, first // the tail first, or out of turn
		}
		for _, r := range ask(back(first), back(second)).Requests {
			require.True(t, r.Grant.OK, "%d", i)
		}
	}
	state, err := apply(background, store, &permit.Batch{Name: "x", Terms: termsOf(config{Rate: 1, Size: 1000, Floor: 1}), Epoch: 1, LocalMicros: func() int64 { return 1_700_000_000_000_000 }})
	require.NoError(t, err)
	require.Equal(t, 500.0, state.Bucket.StoredPermits)
	require.Len(t, state.Bucket.returned, maxReturned)
	for _, p := range places {
		require.False(t, ask(back(p)).Requests[0].Grant.OK, "a second time")
	}
}

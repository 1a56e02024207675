package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redisbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

var background = context.Background()

// redisStores are both, on a client.
func redisStores(client RedisClient, opts ...RedisOption) map[string]Store {
	return map[string]Store{"lock": NewRedisStore(client, opts...), "script": NewRedisScriptStore(client, opts...)}
}

// takes is a batch of one.
func takes(name string, n int64) *permit.Batch {
	return &permit.Batch{
		Name: name, Key: keyName(name), Terms: termsOf(config{Rate: 5, Size: 5, Floor: 1}), Initial: 5, Epoch: rand.Int64N(maxExact) + 1,
		LocalMicros: func() int64 { return time.Now().UnixMicro() },
		Requests:    []permit.Request{{Permits: n, MaxWaitMicros: maxExact}},
	}
}

func within(d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(background, d)
}

// Every kind of client works, on both stores, mixed on one bucket.
func TestClients(t *testing.T) {
	server := redistest.Shared(t)
	pipelining, err := server.Client(t).AutoPipeline()
	require.NoError(t, err)
	t.Cleanup(func() { _ = pipelining.Close() })
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"one": server.Addr}})
	t.Cleanup(func() { _ = ring.Close() })
	for name, client := range map[string]RedisClient{
		"client": server.Client(t), "auto-pipelining": pipelining, "ring": ring,
		"universal": redis.UniversalClient(server.Client(t)),
	} {
		t.Run(name, func(t *testing.T) {
			bucket := fmt.Sprint(t.Name(), rand.Uint64())
			for range 3 {
				for _, store := range redisStores(client) {
					c, cancel := within(5 * time.Second)
					b := takes(bucket, 1)
					_, err := apply(c, store, b)
					cancel()
					require.NoError(t, err)
					require.True(t, b.Requests[0].Grant.OK)
				}
			}
			out, err := apply(background, NewRedisScriptStore(client), &permit.Batch{Name: bucket, Terms: takes("", 1).Terms, Epoch: 1})
			require.NoError(t, err)
			require.EqualValues(t, 7, out.Bucket.Seq, "begun, and six taken")
			require.EqualValues(t, 0, server.Client(t).Exists(background, "tokenbucket:{"+bucket+"}:lock").Val())
		})
	}
}

// With the client's default options, a script whose reply is lost is executed once.
func TestScriptsRunOnce(t *testing.T) {
	for _, which := range []string{"script", "lock"} {
		t.Run(which, func(t *testing.T) {
			server, prefix := redistest.Shared(t), prefixOf(t)
			warm := redisStores(server.Client(t), WithKeyPrefix(prefix))[which]
			_, err := apply(background, warm, takes("x", 1))
			require.NoError(t, err)
			for _, sc := range []script.Script{redisbucket.ApplyScript, redisbucket.ReadScript, redisbucket.CommitScript} {
				if which == "script" != (sc.SHA == redisbucket.ApplyScript.SHA) {
					continue
				}
				proxy := redistest.StartProxy(t, server.Addr)
				proxy.Match(sc.SHA, redistest.Only(1, redistest.LoseReply))
				client := server.Client(t, func(o *redis.Options) { o.Addr, o.ReadTimeout = proxy.Addr, 200*time.Millisecond })
				c, cancel := within(20 * time.Second) // far longer than the client would try again
				_, err := apply(c, redisStores(client, WithKeyPrefix(prefix))[which], takes("x", 1))
				require.Error(t, err)
				require.NoError(t, c.Err())
				cancel()
				if sc.SHA != redisbucket.CommitScript.SHA { // of which a second one is the release that follows a failure
					require.EqualValues(t, 1, proxy.Seen())
				}
				require.LessOrEqual(t, int(proxy.Seen()), 2)
				require.Eventually(t, func() bool {
					return server.Client(t).Exists(background, prefix+"{x}:lock").Val() == 0
				}, 20*time.Second, time.Millisecond)
				require.LessOrEqual(t, int(proxy.Seen()), 2)
			}
			out, err := apply(background, warm, &permit.Batch{Name: "x", Terms: takes("", 1).Terms, Epoch: 1})
			require.NoError(t, err)
			taken := out.Bucket.Seq - 1
			require.EqualValues(t, 2, taken, "the first, and the one whose reply was lost")
		})
	}
}

// Scripts that Redis has forgotten are loaded again, unseen, also by the lock's library.
func TestScriptFlush(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	for name, store := range redisStores(client, WithKeyPrefix(prefixOf(t))) {
		for range 20 {
			require.NoError(t, client.ScriptFlush(background).Err())
			_, err := apply(background, store, takes(name, 1))
			require.NoError(t, err)
		}
	}
}

// deaf is a store that may take long, and heeds no context, as a Redis client does.
type deaf struct {
	Store
	trip atomic.Int64
}

func (s *deaf) Apply(ctx context.Context, b *Batch) error {
	time.Sleep(time.Duration(s.trip.Load()))
	return s.Store.Apply(ctx, b)
}

// Ten thousand callers return by their own deadlines when the store hangs; callers without a deadline return within the store timeout. The
// permits of a batch whose callers have left are refunded.
func TestHungRedis(t *testing.T) {
	bubble(t, func(t *testing.T) {
		store := &deaf{Store: NewMemoryStore()}
		l, err := NewSmoothBursty("x", 100, WithStore(store), WithStoreTimeout(5*time.Second), Logged(t))
		require.NoError(t, err)
		impatient, err := NewSmoothBursty("x", 100, WithStore(store), WithStoreTimeout(500*time.Millisecond), Logged(t))
		require.NoError(t, err)
		ok, err := l.Try(background)
		require.NoError(t, err)
		require.True(t, ok)
		store.trip.Store(int64(10 * time.Second))
		var callers sync.WaitGroup
		for range 10_000 {
			callers.Go(func() {
				began := time.Now()
				c, cancel := within(300 * time.Millisecond)
				defer cancel()
				_, err := l.Acquire(c, 1)
				if !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
				if took := time.Since(began); took != 300*time.Millisecond {
					t.Error(took)
				}
			})
		}
		callers.Wait()
		began := time.Now()
		_, err = impatient.TryAcquire(background, 1, 100*time.Millisecond)
		require.ErrorIs(t, err, ErrStoreTimeout)
		require.Equal(t, 500*time.Millisecond, time.Since(began))
		store.trip.Store(0)
		time.Sleep(20 * time.Second)
		healthy(t, l, true)
		b, err := l.State(background)
		require.NoError(t, err)
		require.Greater(t, b.Seq, int64(2), "the store had taken some")
		require.Equal(t, 100.0, b.StoredPermits, "all are back")
	})
}

// Run later than its deadline, a script takes nothing; when only the clock has stepped, it is tried once more.
func TestDeadlineInTheScript(t *testing.T) {
	server := redistest.Shared(t)
	client := server.Client(t)
	store := NewRedisScriptStore(client)
	name := fmt.Sprint(t.Name(), rand.Uint64())
	server1, err := client.Time(background).Result()
	require.NoError(t, err)
	for skew, want := range map[time.Duration]bool{0: true, -time.Hour: true, time.Hour: true} {
		c, cancel := within(time.Second)
		b := takes(name, 1)
		b.ServerMicros, b.ServerRead = server1.Add(skew).UnixMicro(), time.Now()
		_, err := apply(c, store, b)
		cancel()
		require.Equal(t, want, err == nil, "%v: %v", skew, err)
	}
	reply, err := redisbucket.ApplyScript.Run(background, client, 2, "tokenbucket:{late}", "tokenbucket:{late}:lock",
		"", "500", "", "1", "", "bursty now 5 5 1 0\n\n8239 5 lasting 1\nT 1 1 0 ")
	require.NoError(t, err)
	require.Equal(t, "late", reply[1])
	require.EqualValues(t, 0, client.Exists(background, "tokenbucket:{late}").Val())
}

// The script waits until its deadline while another client holds the lock. A lock without an expiry, or one left behind by a clock that was
// set back, is cut to its time to live.
func TestScriptHonoursLock(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := fmt.Sprint(t.Name(), rand.Uint64(), ":")
	for which, store := range redisStores(client, WithKeyPrefix(prefix), WithLockTTL(200*time.Millisecond)) {
		t.Run(which, func(t *testing.T) {
			lock := prefix + "{x}:lock"
			require.NoError(t, client.Set(background, lock, "other", time.Hour).Err())
			c, cancel := within(100 * time.Millisecond)
			_, err := apply(c, store, takes("x", 1))
			cancel()
			require.ErrorIs(t, err, ErrLockNotObtained)
			require.NotContains(t, err.Error(), "locked ")
			require.ErrorContains(t, err, lock)
			require.EqualValues(t, 0, client.Exists(background, prefix+"{x}").Val())
			require.NoError(t, client.Set(background, lock, "other", 0).Err())
			c, cancel = within(5 * time.Second)
			_, err = apply(c, store, takes("x", 1))
			cancel()
			require.NoError(t, err)
			client.Del(background, prefix+"{x}")
		})
	}
}

// A value that is not a state, or of another type, is ErrCorruptState, names the key, and stays; a later format says so.
func TestForeignValues(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := fmt.Sprint(t.Name(), rand.Uint64(), ":")
	bucket := prefix + "{x}"
	for which, store := range redisStores(client, WithKeyPrefix(prefix)) {
		for name, set := range map[string]func(){
			"text":         func() { client.Set(background, bucket, "hello", 0) },
			"later format": func() { client.Set(background, bucket, "tb99 everything=else", 0) },
			"10 MB":        func() { client.Set(background, bucket, strings.Repeat("x", 10<<20), 0) },
			"list":         func() { client.RPush(background, bucket, 1) },
			"hash":         func() { client.HSet(background, bucket, "a", 1) },
		} {
			t.Run(which+" "+name, func(t *testing.T) {
				client.Del(background, bucket)
				set()
				before := client.Dump(background, bucket).Val()
				_, err := apply(background, store, takes("x", 1))
				require.ErrorIs(t, err, ErrCorruptState)
				require.ErrorContains(t, err, bucket)
				require.Less(t, len(err.Error()), 500)
				if name == "later format" {
					require.ErrorContains(t, err, "tb99")
				}
				require.Equal(t, before, client.Dump(background, bucket).Val())
				require.Eventually(t, func() bool { return client.Exists(background, bucket+":lock").Val() == 0 },
					20*time.Second, time.Millisecond)
			})
		}
	}
}

// The key lives for the debt, the time to fill up and a day; reading writes nothing.
func TestKeyAndTTL(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := fmt.Sprint(t.Name(), rand.Uint64(), ":")
	for which, store := range redisStores(client, WithKeyPrefix(prefix)) {
		l, err := NewSmoothBursty(which, 5, WithStore(store), patient)
		require.NoError(t, err)
		b, err := l.State(background)
		require.NoError(t, err)
		require.Equal(t, 1.0, b.StoredPermits)
		require.EqualValues(t, 0, client.Exists(background, prefix+"{"+which+"}").Val())
		_, err = l.Reserve(background, 501)
		require.NoError(t, err)
		ttl := client.PTTL(background, prefix+"{"+which+"}").Val()
		require.InDelta(t, (25*time.Hour + 100*time.Second + time.Second).Seconds(), ttl.Seconds(), 1)
	}
}

// What a Redis that has lost its state forgets is the debt, and one permit comes; refunds from before find nothing to go back to.
func TestFlushAll(t *testing.T) {
	for _, which := range []string{"script", "lock"} {
		t.Run(which, func(t *testing.T) {
			client, prefix := redistest.Shared(t).Client(t), prefixOf(t)
			store := redisStores(client, WithKeyPrefix(prefix))[which]
			const rate = 0.01 // so that no permit comes by itself
			l, err := NewSmoothBursty("x", rate, WithStore(store), WithMaxPermits(50), patient)
			require.NoError(t, err)
			var held []*Reservation
			for range 20 {
				r, err := l.Reserve(background, 1)
				require.NoError(t, err)
				held = append(held, r)
			}
			require.NoError(t, client.Del(background, prefix+"{x}").Err())
			granted := 0
			began := time.Now()
			for granted == 0 && time.Since(began) < 20*time.Second {
				ok, err := l.TryAcquire(background, 1, 0)
				require.NoError(t, err)
				if ok {
					granted++
				}
			}
			t.Logf("the loss showed after %v", time.Since(began))
			require.Equal(t, 1, granted)
			ok, err := l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			require.False(t, ok, "one, and no full bucket")
			for _, r := range held {
				require.NoError(t, r.Cancel(background))
			}
			b, err := l.State(background)
			require.NoError(t, err)
			require.Less(t, b.StoredPermits, 1.0)
		})
	}
}

// Refunds after SetRate return time that still lies ahead and no stored permits; after Reset, nothing.
func TestRefundsAfterSetRateAndReset(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := fmt.Sprint(t.Name(), rand.Uint64(), ":")
	for which, store := range redisStores(client, WithKeyPrefix(prefix)) {
		t.Run(which, func(t *testing.T) {
			l, err := NewSmoothBursty(which, 5, WithStore(store), patient, WithMaxPermits(50), WithInitialPermits(50))
			require.NoError(t, err)
			began := time.Now()                  // a cancel leaves the bucket as it was then
			r, err := l.Reserve(background, 100) // 50 stored, 10 s
			require.NoError(t, err)
			require.NoError(t, l.SetRate(background, 5000))
			require.NoError(t, r.Cancel(background))
			b, err := l.State(background)
			require.NoError(t, err)
			accrued := 5000*time.Since(began).Seconds() + 1
			require.LessOrEqual(t, b.StoredPermits, accrued, "what accrued meanwhile at the new rate, not fifty times a thousand")
			require.LessOrEqual(t, b.NextFreeTicketMicros, b.SeenMicros+1_000_000, "the ten seconds are back")

			r, err = l.Reserve(background, 100_000)
			require.NoError(t, err)
			require.NoError(t, l.Reset(background))
			require.NoError(t, r.Cancel(background))
			b, err = l.State(background)
			require.NoError(t, err)
			require.Equal(t, 50.0, b.StoredPermits)
			require.Zero(t, b.setting.Version)
		})
	}
}

// No name leaves its braces, no two share a key, and a bucket's keys share what stands in braces, so a cluster keeps them in one
// slot.
func TestNamesAndSlots(t *testing.T) {
	store := NewRedisScriptStore(redistest.Shared(t).Client(t), WithKeyPrefix(prefixOf(t)))
	random := redistest.Seed(t)
	names := []string{"{}", "{a}{b}", "a}{b", "%7B", "{", "\x00", "a\r\nSET x 1\r\n", " ", "x", "x:lock", "é", strings.Repeat("{", 512)}
	for len(names) < 50_000 {
		name := make([]byte, 1+random.IntN(20))
		for i := range name {
			name[i] = byte(random.IntN(128))
			if random.IntN(4) == 0 {
				name[i] = "{}%:"[random.IntN(4)]
			}
		}
		names = append(names, string(name))
	}
	// A cluster hashes what stands between the first { and the first } behind it, if that is anything.
	hashed := func(key string) string {
		_, rest, opened := strings.Cut(key, "{")
		tag, _, closed := strings.Cut(rest, "}")
		if opened && closed && tag != "" {
			return tag
		}
		return key
	}
	seen := map[string]string{}
	for _, name := range names {
		bucket, lock := store.redis.Keys(keyName(name))
		if other, ok := seen[bucket]; ok && other != name {
			t.Fatalf("%q and %q share a key", name, other)
		}
		seen[bucket] = name
		if hashed(bucket) != hashed(lock) || hashed(bucket) == bucket {
			t.Fatalf("%q: keys %q and %q", name, bucket, lock)
		}
	}
	for _, name := range names[:12] {
		b := takes(name, 1)
		_, err := apply(background, store, b)
		require.NoError(t, err, "%q", name)
		require.True(t, b.Requests[0].Grant.OK)
	}
}

// A script that runs too late takes nothing, and says so; it is tried once more, in case the server's clock had stepped.
func TestTooLate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		client := new(fakeRedis)
		l, err := NewSmoothBursty("x", 1000, WithStore(NewRedisScriptStore(client)), Logged(t))
		require.NoError(t, err)
		client.late.Store(true)
		_, err = l.Try(background)
		require.ErrorIs(t, err, ErrStoreTimeout)
		require.ErrorContains(t, err, "too late and took nothing")
		client.late.Store(false)
		healthy(t, l, true)
	})
}

// A key expires a minute after its bucket is full if a new bucket would be equal; otherwise after a day and an hour.
func TestTimeToLive(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := prefixOf(t)
	for which, store := range redisStores(client, WithKeyPrefix(prefix)) {
		for name, kind := range keptKinds {
			t.Run(which+"/"+name, func(t *testing.T) {
				l, err := NewSmoothBursty(t.Name(), 10, append(kind.opts, WithStore(store), patient)...)
				require.NoError(t, err)
				for range 5 { // with predictions, too
					_, err = l.Acquire(background, 1)
					require.NoError(t, err)
				}
				if kind.change != nil {
					require.NoError(t, kind.change(l))
				}
				left := client.PTTL(background, prefix+"{"+keyName(t.Name())+"}").Val()
				if kind.renewed {
					require.LessOrEqual(t, left, 63*time.Second)
					require.Greater(t, left, 20*time.Second)
				} else {
					require.Greater(t, left, 24*time.Hour)
				}
			})
		}
	}
}

// A large value of another program under a bucket's key is an error that names the key. It is not transferred for that.
func TestLargeForeignValue(t *testing.T) {
	const size = 64 << 20
	server := redistest.Start(t)
	client := server.Client(t)
	peak := func() (bytes int64) {
		info := client.InfoMap(background, "memory").Val()
		_, err := fmt.Sscan(info["Memory"]["used_memory_peak"], &bytes)
		require.NoError(t, err)
		return bytes
	}
	script := NewRedisScriptStore(client, WithKeyPrefix("large:"))
	stores := map[string]Store{
		"script": script, "lock": NewRedisStore(client, WithKeyPrefix("large:")), "exchange": renamed{NewRedisStore(client, WithKeyPrefix("large:"))},
	}
	open := func(store Store, name string) *RateLimiter {
		l, err := NewSmoothBursty(name, 1e5, WithStore(store), patient, quietly)
		require.NoError(t, err)
		return l
	}
	require.NoError(t, client.SetRange(background, "large:{x}", size, "x").Err())
	for what, store := range stores {
		l := open(store, "x")
		for range 3 {
			_, err := l.Try(background)
			require.ErrorIs(t, err, ErrCorruptState, what)
			require.ErrorContains(t, err, `key "large:{x}"`, what)
		}
	}
	limiters := []*RateLimiter{open(script, "x")}
	for i := range 20 {
		limiters = append(limiters, open(script, fmt.Sprint("other", i)))
	}
	var wg sync.WaitGroup
	for i, l := range limiters {
		wg.Go(func() {
			for range 20 {
				if _, err := l.Try(background); errors.Is(err, ErrCorruptState) != (i == 0) || i > 0 && err != nil {
					t.Error(i, err)
				}
			}
		})
	}
	wg.Wait()
	require.Less(t, peak(), int64(size)*3/2)
	require.EqualValues(t, size+1, client.StrLen(background, "large:{x}").Val())
}

// renamed is a store that makes batches of its own, for another.
type renamed struct{ Store }

func (s renamed) Apply(ctx context.Context, b *Batch) error {
	return s.Store.Apply(ctx, &Batch{Names: b.Names, Decide: b.Decide})
}

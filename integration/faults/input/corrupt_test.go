package input

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// good is a state of a bucket of 5/s. It is followed by edits of it, by hand or by another program.
const good = "tb1 epoch=8239 seq=12 tail=12 stored=4.5 next=1700000000000000 carry=0 debt=0 back=0: bursty now 5 5 1 0"

// foreign are what may stand under a bucket's key and is no state, and how it got there.
func foreign() map[string]func(client *redis.Client, key string) {
	all := map[string]func(client *redis.Client, key string){
		"list":   func(c *redis.Client, key string) { c.RPush(ctx, key, good) },
		"set":    func(c *redis.Client, key string) { c.SAdd(ctx, key, good) },
		"hash":   func(c *redis.Client, key string) { c.HSet(ctx, key, "stored", 4.5) },
		"scores": func(c *redis.Client, key string) { c.ZAdd(ctx, key, redis.Z{Score: 1, Member: good}) },
		"stream": func(c *redis.Client, key string) { c.XAdd(ctx, &redis.XAddArgs{Stream: key, Values: []any{"a", 1}}) },
	}
	text := func(name, value string) {
		all[name] = func(c *redis.Client, key string) { c.Set(ctx, key, value, time.Hour) }
	}
	text("words", "hello")
	text("JSON", `{"rate":5}`)
	text("a number", "5")
	text("10 MB", strings.Repeat("x", 10<<20))
	text("10 MB that begin well", good+strings.Repeat(" ", 10<<20))
	text("bytes", "\x00\xff\r\n\x1b[2J")
	text("half of it", good[:len(good)/2])
	text("no configuration", good[:strings.Index(good, " bursty")])
	text("twice", good+" "+good)
	text("another kind", strings.Replace(good, "bursty", "windows", 1))
	text("a later format", "tb2 "+strings.TrimPrefix(good, "tb1 "))
	text("a much later format", "tb99 everything=else")
	for _, field := range []string{"epoch=8239", "seq=12", "tail=12", "stored=4.5", "next=1700000000000000", "carry=0", "debt=0", "back=0:", "now 5 5 1 0"} {
		name, _, _ := strings.Cut(field, "=")
		text("without "+name, strings.Replace(good, " "+field, "", 1))
		for _, value := range []string{"nan", "inf", "-inf", "1e308", "0x10", "", "1e999", "five"} {
			edited := name + "=" + value
			if name == "back" {
				edited += ":"
			} else if name == field {
				name, edited = "rate", "now "+value+" 5 1 0"
			}
			text(name+" "+value, strings.Replace(good, field, edited, 1))
		}
	}
	for _, field := range []string{"epoch=8239", "seq=12", "tail=12", "stored=4.5", "back=0:"} {
		name, _, _ := strings.Cut(field, "=")
		text(name+" -5", strings.Replace(good, field, name+"=-5", 1))
	}
	return all
}

// I2: a value that is no state is a tokenbucket.ErrCorruptState for every request to the bucket, Reset included, in processes that have
// read the intact state before, and in others. The error names the key, and shows no more than the beginning of the value and nothing of
// the script. The value stays as it is, with its time to live, and no lock is left.
func TestI2Corrupt(t *testing.T) {
	for which, store := range faultlab.Stores {
		t.Run(which, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			client := server.Client(t, patient)
			const key = "tokenbucket:{x}"
			refused, unheard := 0, 0
			for name, set := range foreign() {
				warm, err := tokenbucket.NewSmoothBursty("x", 5, tokenbucket.WithStore(store(client)), tokenbucket.WithStoreTimeout(limit))
				require.NoError(t, err)
				require.NoError(t, client.Del(ctx, key).Err())
				held, err := warm.Reserve(ctx, 1_000_000) // due in days
				require.NoError(t, err)
				cold, err := tokenbucket.NewSmoothBursty("x", 5, tokenbucket.WithStore(store(client)), tokenbucket.WithStoreTimeout(limit))
				require.NoError(t, err)

				require.NoError(t, client.Del(ctx, key).Err())
				set(client, key)
				before, expires := client.Dump(ctx, key).Val(), client.PExpireTime(ctx, key).Val()
				require.NotEmpty(t, before)
				asks := verbs(cold)
				for _, verb := range []string{"State", "Reserve", "Reset"} { // others may be refused without asking: the bucket was empty
					asks["warm "+verb] = verbs(warm)[verb]
				}
				asks["Cancel"] = func() error { return held.Cancel(ctx) }
				for verb, ask := range asks {
					err := ask()
					what := fmt.Sprint(name, ": ", verb)
					if verb == "Cancel" && err == nil { // a batch is under way, and the next one takes care of it
						unheard++
						continue
					}
					require.ErrorIs(t, err, tokenbucket.ErrCorruptState, what)
					require.Contains(t, err.Error(), key, what)
					require.Less(t, len(err.Error()), 500, what)
					require.NotRegexp(t, `script|[Ll]ua|stack|attempt to|\x00|\x1b`, err.Error(), what)
					if strings.Contains(name, "later format") {
						require.Contains(t, err.Error(), "another release", what)
					}
					refused++
				}
				require.Equal(t, before, client.Dump(ctx, key).Val(), name)
				require.Equal(t, expires, client.PExpireTime(ctx, key).Val(), name)
			}
			t.Logf("%d places given back later", unheard)
			faultlab.Figure(t, "values", len(foreign()))
			faultlab.Figure(t, "typed errors", refused)
			require.Less(t, unheard, len(foreign())/2)
			require.Greater(t, refused, 1000)
			require.NoError(t, redistest.Poll(limit, func() error {
				if n := client.Exists(ctx, key+":lock").Val(); n != 0 {
					return fmt.Errorf("the lock is still there")
				}
				return nil
			}))
			// After an operator has deleted it, there is a new bucket.
			require.NoError(t, client.Del(ctx, key).Err())
			l, err := tokenbucket.NewSmoothBursty("x", 5, tokenbucket.WithStore(store(client)), tokenbucket.WithStoreTimeout(limit))
			require.NoError(t, err)
			ok, err := l.Try(ctx)
			require.NoError(t, err)
			require.True(t, ok)
		})
	}
}

// I2: one corrupt bucket does not harm the others that share its call of the script.
func TestI2NeighboursOfCorrupt(t *testing.T) {
	server := redistest.Start(t)
	client := server.Client(t, patient)
	store := tokenbucket.NewRedisScriptStore(client)
	names := []string{"hash", "text"}
	require.NoError(t, client.HSet(ctx, "tokenbucket:{hash}", "a", 1).Err())
	require.NoError(t, client.Set(ctx, "tokenbucket:{text}", "hello", 0).Err())
	for i := range 30 {
		names = append(names, fmt.Sprint("good", i))
	}
	var limiters []*tokenbucket.RateLimiter
	for _, name := range names {
		l, err := tokenbucket.NewSmoothBursty(name, 5, tokenbucket.WithStore(store), tokenbucket.WithStoreTimeout(limit))
		require.NoError(t, err)
		limiters = append(limiters, l)
	}
	rounds, taken := 0, 0
	for shared := 0; shared < 3; rounds++ {
		require.Less(t, rounds, 1000, "no two buckets share a call")
		require.NoError(t, client.ConfigResetStat(ctx).Err())
		require.NoError(t, client.Do(ctx, "CLIENT", "PAUSE", 20, "WRITE").Err()) // all but the first trips wait ashore
		var callers sync.WaitGroup
		errs := make([]error, len(limiters))
		for i, l := range limiters {
			callers.Go(func() { _, errs[i] = l.Reserve(ctx, 1) })
		}
		callers.Wait()
		for i, err := range errs {
			if i < 2 {
				require.ErrorIs(t, err, tokenbucket.ErrCorruptState, names[i])
				require.Contains(t, err.Error(), "tokenbucket:{"+names[i]+"}")
			} else {
				require.NoError(t, err, names[i])
				taken++
			}
		}
		if strings.Contains(client.Info(ctx, "commandstats").Val(), "cmdstat_mget:") {
			shared++
		}
	}
	for _, l := range limiters[2:] {
		b, err := l.State(ctx)
		require.NoError(t, err)
		require.EqualValues(t, rounds+1, b.Seq, "begun, and one permit a round")
	}
	require.Equal(t, map[string]string{"a": "1"}, client.HGetAll(ctx, "tokenbucket:{hash}").Val())
	require.Equal(t, "hello", client.Get(ctx, "tokenbucket:{text}").Val())
	t.Logf("%d permits of 30 buckets in %d rounds beside two corrupt ones", taken, rounds)
}

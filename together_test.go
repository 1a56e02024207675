package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// copied is a store whose batches are copies, which the store behind it does not recognise: it decides on states as text.
type copied struct {
	Store
	now *int64 // of the decisions
}

func (s copied) Apply(ctx context.Context, b *Batch) error {
	return s.Store.Apply(ctx, &Batch{Names: b.Names, Decide: func(_ int64, states [][]byte) ([][]byte, time.Duration, error) {
		return b.Decide(*s.now, states)
	}})
}

// drawGroup draws batches for buckets, each with requests of its own, and joint requests of all.
func drawGroup(t *rapid.T, names []string, configs [][]config, places [][]permit.Place, now int64) *permit.Group {
	g := &permit.Group{Choice: permit.Choice(rapid.IntRange(0, 1).Draw(t, "choice"))}
	for m, name := range names {
		c := rapid.SampledFrom(configs[m]).Draw(t, "config")
		b := &permit.Batch{
			Name: name, Key: keyName(name), Terms: termsOf(c), Known: termsOf(rapid.SampledFrom(configs[m]).Draw(t, "known")),
			Initial: rapid.OneOf(rapid.Float64Range(0, max(c.Size, c.Floor)), rapid.Just(max(c.Size, c.Floor))).Draw(t, "initial"),
			Epoch:   rapid.Int64Range(1, maxExact).Draw(t, "epoch"), LocalMicros: func() int64 { return now },
			Transient: rapid.Bool().Draw(t, "transient"),
		}
		for range rapid.SampledFrom([]int{0, 0, 0, 1, 2}).Draw(t, "own") {
			r := drawRequest(t, places[m])
			if r.Op == permit.Reset || r.Op == permit.ResetQuota {
				continue // a group sends none
			}
			b.Requests = append(b.Requests, r)
		}
		g.Members = append(g.Members, b)
	}
	for range rapid.IntRange(0, 3).Draw(t, "joint") {
		joint := make([]permit.Request, len(names))
		for m := range joint {
			joint[m] = permit.Request{
				Permits:       rapid.OneOf(rapid.Int64Range(1, 20), rapid.Int64Range(1, 20), rapid.Int64Range(1, maxExact)).Draw(t, "permits"),
				MaxWaitMicros: rapid.OneOf(rapid.Just(int64(0)), rapid.Int64Range(0, 10_000_000), rapid.Just(int64(maxExact)), rapid.Just(int64(maxExact))).Draw(t, "wait"),
			}
		}
		for range rapid.SampledFrom([]int{1, 1, 2, 17}).Draw(t, "count") {
			g.Joint++
			for m, b := range g.Members {
				b.Requests = append(b.Requests, joint[m])
			}
		}
	}
	return g
}

// cloned returns a copy of a group, for another decision.
func cloned(g *permit.Group) *permit.Group {
	twin := *g
	twin.Members = nil
	for _, b := range g.Members {
		c := *b
		c.Requests = slices.Clone(b.Requests)
		twin.Members = append(twin.Members, &c)
	}
	return &twin
}

// Every store decides the batches of a group as applyTogether does, to the last bit, and all buckets or none: with own requests of the members
// among them, places given back, configurations that change, and locks that another process holds.
//
// With the script store these are 25,000 batches in CI, and half of them elsewhere.
func TestGroupDifferential(t *testing.T) {
	redistest.InOneGoroutine(t)
	client := patientClient(t)
	prefix := fmt.Sprint(t.Name(), rand.Uint64(), ":")
	options := []RedisOption{WithLocalTime(), WithKeyPrefix(prefix)}
	for _, s := range []struct {
		name  string
		store Store
		steps int
	}{
		{"script", NewRedisScriptStore(client, options...), sized(250, 40)},
		{"lock", NewRedisStore(client, options...), sized(50, 6)},
		{"exchange", copied{NewRedisStore(client, options...), new(int64)}, sized(50, 6)},
	} {
		t.Run(s.name, func(t *testing.T) { groupDifferential(t, client, s.store, prefix, s.steps) })
	}
}

func groupDifferential(t *testing.T, client *redis.Client, store Store, prefix string, steps int) {
	var granted, refused, returned, held, unchanged int
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 4).Draw(rt, "members")
		names, keys := make([]string, n), make([]string, n)
		configs, places, texts := make([][]config, n), make([][]permit.Place, n), make([]string, n)
		for m := range names {
			names[m] = fmt.Sprint("m", m, "-", rand.Uint64())
			keys[m] = prefix + "{" + keyName(names[m]) + "}"
			which := kind(rapid.IntRange(0, 1).Draw(rt, "kind"))
			usual := drawConfig(rt, which)
			configs[m] = []config{usual, usual, usual, drawConfig(rt, which), drawConfig(rt, kind(rapid.IntRange(0, 1).Draw(rt, "other kind")))}
			configs[m] = append(configs[m], usual, usual, usual, usual, usual, usual, usual, usual, usual)
		}
		now := int64(1_700_000_000_000_000)
		for range steps {
			now = drawTime(rt, now)
			if s, ok := store.(copied); ok {
				*s.now = now
			}
			g := drawGroup(rt, names, configs, places, now)
			twin := cloned(g)
			if rapid.IntRange(0, 20).Draw(rt, "locked") == 0 {
				held++
				lock := keys[rapid.IntRange(0, n-1).Draw(rt, "which")] + ":lock"
				require.NoError(rt, client.Set(background, lock, "another", time.Minute).Err())
				c, cancel := within(3 * time.Millisecond)
				err := askTogether(c, store, cloned(g))
				cancel()
				require.Error(rt, err)
				require.Equal(rt, texts, statesOf(rt, client, keys), "nothing is written while another process holds a lock")
				require.NoError(rt, client.Del(background, lock).Err())
			}

			buckets := make([]*PermitBucket, n)
			for m := range buckets {
				buckets[m] = new(PermitBucket)
				require.NoError(rt, buckets[m].parse(texts[m], nil))
			}
			want := applyTogether(now, g, buckets)
			if want != nil {
				require.ErrorIs(rt, want, ErrInvalidConfig)
			} else {
				for m, b := range buckets {
					if g.Members[m].Outcome.Changed {
						texts[m] = string(b.appendText(nil))
					} else {
						unchanged++
					}
				}
			}
			c, cancel := within(time.Minute)
			got := askTogether(c, store, twin)
			cancel()
			require.Equal(rt, fmt.Sprint(want), fmt.Sprint(got))
			require.Equal(rt, texts, statesOf(rt, client, keys))
			if want != nil {
				continue
			}
			for m, b := range g.Members {
				require.Equal(rt, b.Outcome.Bucket.Balance, twin.Members[m].Outcome.Bucket.Balance)
				require.Equal(rt, b.Outcome.NowMicros, twin.Members[m].Outcome.NowMicros)
				for i := range b.Requests {
					r := &b.Requests[i]
					if r.Grant != twin.Members[m].Requests[i].Grant {
						require.Equal(rt, r.Grant, twin.Members[m].Requests[i].Grant)
					}
					if r.Grant.OK && r.Op == permit.GiveBack {
						returned++
					}
					if r.Grant.OK && r.Op == permit.Take {
						places[m] = append(places[m], r.Grant.Place)
					}
				}
				places[m] = places[m][max(0, len(places[m])-30):]
			}
			for i := range g.Joint {
				taken := 0
				for m := range g.Members {
					if g.Request(m, i).Grant.OK {
						taken++
					}
				}
				switch {
				case taken == 0:
					refused++
				case g.Choice == permit.Any:
					require.Equal(rt, 1, taken)
					granted++
				default:
					require.Equal(rt, n, taken)
					granted++
				}
			}
		}
	})
	t.Logf("%d joint requests granted, %d refused, %d places given back, %d times a lock was held", granted, refused, returned, held)
	require.Greater(t, granted, 20*steps)
	require.Greater(t, refused, 20*steps)
	require.Greater(t, returned, steps)
	require.Greater(t, held, steps)
	require.Greater(t, unchanged, steps)
}

// grantsOf returns the results of a batch.
func grantsOf(b *permit.Batch) (grants []permit.Grant) {
	for i := range b.Requests {
		grants = append(grants, b.Requests[i].Grant)
	}
	return grants
}

// statesOf returns the values of keys, "" for a missing one.
func statesOf(t require.TestingT, client *redis.Client, keys []string) []string {
	values, err := client.MGet(background, keys...).Result()
	require.NoError(t, err)
	states := make([]string, len(values))
	for i, v := range values {
		states[i], _ = v.(string)
	}
	return states
}

// Memory decides the batches of a group as applyTogether does.
func TestGroupInMemory(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		store := NewMemoryStore()
		n := rapid.IntRange(1, 4).Draw(rt, "members")
		names := make([]string, n)
		configs, places := make([][]config, n), make([][]permit.Place, n)
		buckets := make([]*PermitBucket, n)
		for m := range names {
			names[m], buckets[m] = fmt.Sprint(m), new(PermitBucket)
			configs[m] = []config{drawConfig(rt, bursty), drawConfig(rt, bursty)}
		}
		now := int64(1_700_000_000_000_000)
		for range 20 {
			now += rapid.Int64Range(0, 500_000).Draw(rt, "gap")
			g := drawGroup(rt, names, configs, places, now)
			twin := cloned(g)
			next := make([]*PermitBucket, n)
			for m, b := range buckets {
				state := *b
				next[m] = &state
			}
			require.NoError(rt, applyTogether(now, g, next))
			require.NoError(rt, askTogether(background, store, twin))
			for m, b := range g.Members {
				if b.Outcome.Changed {
					buckets[m] = next[m]
				}
				require.Equal(rt, grantsOf(b), grantsOf(twin.Members[m]))
				for i := range b.Requests {
					if r := &b.Requests[i]; r.Grant.OK && r.Op == permit.Take {
						places[m] = append(places[m], r.Grant.Place)
					}
				}
			}
		}
	})
}

// A right prediction of a group leaves the states that the script would have computed, and a wrong one changes nothing.
func TestGroupGuess(t *testing.T) {
	redistest.InOneGoroutine(t)
	client := redistest.Shared(t).Client(t)
	prefix := fmt.Sprint(t.Name(), rand.Uint64(), ":")
	store := NewRedisScriptStore(client, WithLocalTime(), WithKeyPrefix(prefix))
	var predicted, others int
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(2, 3).Draw(rt, "members")
		names, keys := make([]string, n), make([]string, n)
		configs, places, texts := make([][]config, n), make([][]permit.Place, n), make([]string, n)
		sessions := make([][]permit.Session, 2)
		for m := range names {
			names[m] = fmt.Sprint("m", m, "-", rand.Uint64())
			keys[m] = prefix + "{" + names[m] + "}"
			configs[m] = []config{drawConfig(rt, kind(rapid.IntRange(0, 1).Draw(rt, "kind")))}
			for p := range sessions {
				sessions[p] = append(sessions[p], newSession())
			}
		}
		now := int64(1_700_000_000_000_000)
		for range sized(60, 30) {
			now += rapid.Int64Range(0, 2_000_000).Draw(rt, "gap")
			g := drawGroup(rt, names, configs, places, now)
			if rapid.IntRange(0, 4).Draw(rt, "plain") > 0 { // so that all of it is granted
				for m := range g.Members {
					g.Members[m].Requests = []permit.Request{{Permits: rapid.Int64Range(1, 3).Draw(rt, "permits"), MaxWaitMicros: maxExact}}
				}
				g.Joint = 1
			}
			if rapid.IntRange(0, 40).Draw(rt, "lost") == 0 {
				require.NoError(rt, client.Del(background, keys[0]).Err())
				texts[0] = ""
			}
			twin := cloned(g)
			process := min(1, rapid.IntRange(0, 12).Draw(rt, "process")/12)
			for m := range twin.Members {
				twin.Members[m].Session = sessions[process][m]
			}
			buckets := make([]*PermitBucket, n)
			for m := range buckets {
				buckets[m] = new(PermitBucket)
				require.NoError(rt, buckets[m].parse(texts[m], nil))
			}
			require.NoError(rt, applyTogether(now, g, buckets))
			for m, b := range buckets {
				if g.Members[m].Outcome.Changed {
					texts[m] = string(b.appendText(nil))
				}
			}
			require.NoError(rt, askTogether(background, store, twin))
			require.Equal(rt, texts, statesOf(rt, client, keys))
			if twin.Members[0].Outcome.Local != 0 {
				predicted++
			} else {
				others++
			}
			for m, b := range g.Members {
				require.Equal(rt, grantsOf(b), grantsOf(twin.Members[m]))
			}
		}
	})
	t.Logf("%d right predictions, %d decided in full", predicted, others)
	require.Greater(t, predicted, 200)
	require.Greater(t, others, 200)
}

// A store that reports a failure, or does not decide, has decided nothing for a group.
func TestGroupErrorsOfAStore(t *testing.T) {
	g := func() *permit.Group {
		return &permit.Group{Members: []*permit.Batch{takes("a", 1), takes("b", 1)}, Joint: 1}
	}
	require.ErrorContains(t, askTogether(background, &table{idle: true}, g()), "has not called Decide")
	lost := errors.New("lost")
	require.ErrorIs(t, askTogether(background, applies(func(*Batch) error { return lost }), g()), lost)
	err := askTogether(background, applies(func(b *Batch) error {
		_, _, err := b.Decide(time.Now().UnixMicro(), [][]byte{nil, []byte("tb1 of another kind")})
		return err
	}), g())
	require.ErrorIs(t, err, ErrCorruptState)
	require.True(t, strings.Contains(err.Error(), `"b"`), err)
}

// applies is a store by its Apply.
type applies func(*Batch) error

func (f applies) Apply(_ context.Context, b *Batch) error { return f(b) }

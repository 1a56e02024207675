package tokenbucket_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// brokenStore fails in a way that is no outage.
type brokenStore struct{ tb.Store }

func (brokenStore) Apply(context.Context, *tb.Batch) error { return errors.New("out of order") }

// A member of a choice that fails by itself counts as one that refuses: the others grant calls. Its error is returned if none does, and names it.
func TestChoiceGoesOnWithoutAMember(t *testing.T) {
	for _, s := range stores {
		t.Run(s.name, func(t *testing.T) {
			open := s.open(t)
			for name, broken := range map[string]func(*testing.T, tb.Store) *tb.RateLimiter{
				"kind": func(t *testing.T, store tb.Store) *tb.RateLimiter {
					other, err := tb.NewSmoothWarmingUp("broken kind", 10, time.Second, tb.WithStore(store), tb.WithVersion(1))
					require.NoError(t, err)
					_, err = other.Reserve(ctx, 1)
					require.NoError(t, err)
					return limiter(t, "broken kind", 10, quiet, tb.WithStore(store), tb.WithVersion(1))
				},
				"store": func(t *testing.T, store tb.Store) *tb.RateLimiter {
					return limiter(t, "broken store", 10, quiet, tb.WithStore(brokenStore{store}))
				},
			} {
				for _, first := range []bool{true, false} {
					t.Run(name, func(t *testing.T) {
						store := open(false)
						bad, good := broken(t, store), limiter(t, "good", 0.001, tb.WithStore(store), tb.WithMaxPermits(5), tb.WithInitialPermits(5))
						members := []tb.Member{bad, good}
						if !first {
							members = []tb.Member{good, bad}
						}
						_, own := bad.TryAcquire(ctx, 1, 0)
						require.Error(t, own)
						require.NoError(t, good.Reset(ctx))
						c := anyOf(t, members...)
						for range 3 {
							by, err := c.TryAcquire(ctx, 1, 0)
							require.NoError(t, err)
							require.Same(t, good, by)
						}
						r, err := c.TryReserve(ctx, 2, 0)
						require.NoError(t, err)
						require.True(t, r.OK())
						require.Same(t, good, r.TakenFrom())
						_, err = c.TryAcquire(ctx, 1, time.Millisecond)
						var by *tb.MemberError
						require.ErrorAs(t, err, &by)
						require.Equal(t, bad.Name(), by.Bucket)
						for _, kind := range []error{tb.ErrInvalidConfig, tb.ErrStoreUnusable, tb.ErrStoreUnavailable} {
							require.Equal(t, errors.Is(own, kind), errors.Is(err, kind), err)
						}
					})
				}
			}
		})
	}
}

// A key that holds no state of a bucket is an error of its member, in both Redis stores, and the others of a choice go on.
func TestGroupsNameTheCorruptMember(t *testing.T) {
	client := redisClient(t)
	for kind, open := range map[string]func(prefix string) tb.Store{
		"lock":   func(prefix string) tb.Store { return tb.NewRedisStore(client, tb.WithKeyPrefix(prefix)) },
		"script": func(prefix string) tb.Store { return tb.NewRedisScriptStore(client, tb.WithKeyPrefix(prefix)) },
	} {
		for value, set := range map[string]func(key string) error{
			"text": func(key string) error { return client.Set(ctx, key, "hello", 0).Err() },
			"list": func(key string) error { return client.RPush(ctx, key, 1).Err() },
		} {
			for corrupt := range 2 {
				t.Run(fmt.Sprint(kind, " ", value, " ", corrupt), func(t *testing.T) {
					prefix := prefixOf(t)
					store := open(prefix)
					var members []tb.Member
					for i := range 2 {
						members = append(members, limiter(t, fmt.Sprint("member", i), 1000, quiet, tb.WithStore(store)))
					}
					require.NoError(t, set(fmt.Sprintf("%s{member%d}", prefix, corrupt)))
					_, err := all(t, members...).TryAcquire(ctx, 1, time.Second)
					var by *tb.MemberError
					require.ErrorAs(t, err, &by)
					require.ErrorIs(t, err, tb.ErrCorruptState)
					require.Equal(t, fmt.Sprint("member", corrupt), by.Bucket)
					granted, err := anyOf(t, members...).TryAcquire(ctx, 1, time.Second)
					require.NoError(t, err)
					require.Same(t, members[1-corrupt], granted)
				})
			}
		}
	}
}

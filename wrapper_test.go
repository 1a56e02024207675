package tokenbucket

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Wrappers of a *RedisStore, as users write them.
type (
	// embedding has all that the store has, and an Apply of its own.
	embedding struct {
		*RedisStore
		applied atomic.Int64
	}
	// forwarding has nothing but Apply.
	forwarding struct {
		to      Store
		applied atomic.Int64
	}
	// rebuilding passes on the exported fields, in a batch of its own.
	rebuilding struct{ forwarding }
	copying    struct{ forwarding }
)

func (w *embedding) Apply(ctx context.Context, b *Batch) error {
	w.applied.Add(1)
	return w.RedisStore.Apply(ctx, b)
}

func (w *forwarding) Apply(ctx context.Context, b *Batch) error {
	w.applied.Add(1)
	return w.to.Apply(ctx, b)
}

func (w *rebuilding) Apply(ctx context.Context, b *Batch) error {
	return w.forwarding.Apply(ctx, &Batch{Names: b.Names, Decide: b.Decide})
}

func (w *copying) Apply(ctx context.Context, b *Batch) error {
	other := *b
	other.Names = []string{"tenant/" + b.Names[0]}
	return w.forwarding.Apply(ctx, &other)
}

// A batch with other names is decided under these, on every store.
func TestOtherNames(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := prefixOf(t)
	for name, store := range map[string]Store{
		"lock": NewRedisStore(client, WithKeyPrefix(prefix+"lock:")), "script": NewRedisScriptStore(client, WithKeyPrefix(prefix+"script:")), "memory": NewMemoryStore(),
	} {
		t.Run(name, func(t *testing.T) {
			seq := func(bucket string, s Store) int64 {
				l, err := NewSmoothBursty(bucket, 100, WithStore(s), patient)
				require.NoError(t, err)
				b, err := l.State(background)
				require.NoError(t, err)
				return b.Seq
			}
			l, err := NewSmoothBursty("x", 100, WithStore(&copying{forwarding{to: store}}), WithMaxPermits(5), WithInitialPermits(5), patient)
			require.NoError(t, err)
			ok, err := l.TryAcquire(background, 5, 0)
			require.NoError(t, err)
			require.True(t, ok)
			require.EqualValues(t, 2, seq("tenant/x", store), "begun, and taken")
			require.EqualValues(t, 1, seq("x", store), "nobody has used it")
		})
	}
}

// A lock that others want is kept for the next batch. When none comes, it is released, and not left until it expires: by a store
// that is wrapped, too.
func TestKeptLockOfAWrappedStore(t *testing.T) {
	server := redistest.Start(t)
	client := server.Client(t)
	expired := func() int { // keys, of which only locks expire here
		_, rest, ok := strings.Cut(client.Info(background, "stats").Val(), "expired_keys:")
		require.True(t, ok)
		n, err := strconv.Atoi(strings.TrimSpace(strings.SplitN(rest, "\n", 2)[0]))
		require.NoError(t, err)
		return n
	}
	for name, store := range map[string]Store{
		"bare": NewRedisStore(client), "embedding": &embedding{RedisStore: NewRedisStore(client)},
		"forwarding": &forwarding{to: NewRedisStore(client)},
		"rebuilding": &rebuilding{forwarding{to: NewRedisStore(client)}},
	} {
		t.Run(name, func(t *testing.T) {
			const rounds = 10
			left := 0 // to expire; a busy machine may be too late to release it
			for i := range rounds {
				bucket := fmt.Sprint(t.Name(), i)
				lock := "tokenbucket:{" + bucket + "}:lock"
				l, err := NewSmoothBursty(bucket, 100, WithStore(store), patient)
				require.NoError(t, err)
				require.NoError(t, client.Set(background, lock, "another's", time.Minute).Err())
				before := expired()
				time.AfterFunc(10*time.Millisecond, func() { client.Del(background, lock) })
				ok, err := l.TryAcquire(background, 1, 0)
				require.NoError(t, err)
				require.True(t, ok)
				require.Eventually(t, func() bool { return client.Exists(background, lock).Val() == 0 }, 20*time.Second, time.Millisecond)
				left += expired() - before
			}
			require.Less(t, left, rounds/2, "of %d locks", rounds)
		})
	}
}

type embeddingScript struct {
	*RedisScriptStore
	applied atomic.Int64
}

func (w *embeddingScript) Apply(ctx context.Context, b *Batch) error {
	w.applied.Add(1)
	return w.RedisScriptStore.Apply(ctx, b)
}

// embeddingMemory blocks, as a store behind a network does.
type embeddingMemory struct {
	*MemoryStore
	applied atomic.Int64
}

func (w *embeddingMemory) Apply(ctx context.Context, b *Batch) error {
	w.applied.Add(1)
	select {
	case <-time.After(10 * time.Millisecond):
		return w.MemoryStore.Apply(ctx, b)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// A store that embeds another is as much known of as the other, but nothing goes past its own Apply.
func TestEmbeddedStores(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	lock := &embedding{RedisStore: NewRedisStore(client, WithLocalTime())}
	script := &embeddingScript{RedisScriptStore: NewRedisScriptStore(client)}
	memory := &embeddingMemory{MemoryStore: NewMemoryStore()}
	for name, c := range map[string]struct {
		store, within Store
		applied       *atomic.Int64
	}{
		"lock": {lock, lock.RedisStore, &lock.applied}, "script": {script, script.RedisScriptStore, &script.applied},
		"memory": {memory, memory.MemoryStore, &memory.applied},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := NewSmoothBursty(fmt.Sprint(t.Name(), rand.Uint64()), 1e6, WithStore(c.store), WithInitialPermits(1e6))
			require.NoError(t, err)
			ctx, cancel := within(10 * time.Second) // a caller that can leave does not send the batch itself
			defer cancel()
			for range 5 {
				ok, err := l.TryAcquire(ctx, 1, 0)
				require.NoError(t, err)
				require.True(t, ok)
				ok, err = l.TryAcquire(background, 1, 0)
				require.NoError(t, err)
				require.True(t, ok)
			}
			require.EqualValues(t, 10, c.applied.Load())

			got, want := traitsOf(c.store), traitsOf(c.within)
			require.Equal(t, want.decides, got.decides)
			require.Equal(t, want.oneServer, got.oneServer)
			if want.oneServer {
				require.Same(t, healthOf(&want), l.limiter.Coordinator.Health)
			}
			require.Same(t, want.parts, got.parts)
			require.Equal(t, want.probe == nil, got.probe == nil)
			require.Equal(t, want.join == nil, got.join == nil)
			require.Nil(t, got.memory)
			require.Nil(t, got.trips)
			require.Nil(t, got.route)
		})
	}
	for _, bad := range []Store{&embedding{}, &embeddingScript{}, &embedding{RedisStore: &RedisStore{}}, &embedding{RedisStore: NewRedisStore(nil)}} {
		_, err := NewSmoothBursty("x", 1, WithStore(bad))
		require.ErrorIs(t, err, ErrInvalidConfig)
	}
	require.Equal(t, traits{}, traitsOf(&forwarding{to: lock}))
}

// A lock without an expiry has no holder. It does not block a store for ever that is behind a wrapper with batches of its own.
func TestEternalLockBehindAWrapper(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	prefix := prefixOf(t)
	ttl := WithLockTTL(50 * time.Millisecond)
	for name, store := range map[string]Store{
		"lock": NewRedisStore(client, WithKeyPrefix(prefix+"lock:"), ttl), "script": NewRedisScriptStore(client, WithKeyPrefix(prefix+"script:"), ttl),
	} {
		t.Run(name, func(t *testing.T) {
			require.NoError(t, client.Set(background, prefix+name+":{x}:lock", "nobody", 0).Err())
			l, err := NewSmoothBursty("x", 100, WithStore(&rebuilding{forwarding{to: store}}), WithStoreTimeout(10*time.Second), WithInitialPermits(1))
			require.NoError(t, err)
			ok, err := l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			require.True(t, ok)
		})
	}
}

// holder is a store that is compared by what it holds.
type holder struct{ Store }

// A store that is a value is not recognised again if what it holds cannot be compared.
func TestWrappersOfUncomparables(t *testing.T) {
	s := holder{uncomparable{Store: NewMemoryStore()}}
	l, err := NewSmoothBursty("x", 100, WithStore(s), WithInitialPermits(1))
	require.NoError(t, err)
	ok, err := l.TryAcquire(background, 1, 0)
	require.NoError(t, err)
	require.True(t, ok)
}

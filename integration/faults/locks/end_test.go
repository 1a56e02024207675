package locks

import (
	"context"
	"errors"
	"fmt"
	"strconv"
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

// sets is how many SET commands the server has executed, those in scripts included.
func (p *place) sets() int {
	p.t.Helper()
	info, err := p.Info(background, "commandstats").Result()
	require.NoError(p.t, err)
	_, rest, _ := strings.Cut(info, "cmdstat_set:calls=")
	digits, _, _ := strings.Cut(rest, ",")
	n, _ := strconv.Atoi(digits) // none: 0
	return n
}

// A server hangs just when a client asks for the lock, and the caller leaves. When the server goes on, it grants the lock to a client that
// is gone, and no other client waits for that longer than the lock's time to live; the call takes nothing. The client may have closed the
// connection by then, or still read from it.
func TestC3OrphanObtain(t *testing.T) {
	late := faultlab.MeasureLateness(t)
	const ttl, patience, hang = 500 * time.Millisecond, 300 * time.Millisecond, 3 * time.Second
	for _, listens := range []time.Duration{200 * time.Millisecond, 5 * time.Second} {
		t.Run(fmt.Sprint("client listens ", listens), func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			p := newPlace(t, server)
			impatient := server.Client(t, func(o *redis.Options) { o.ReadTimeout = listens })
			var hung sync.Once
			stopped, armed := make(chan error, 1), false
			tap := &tapped{RedisClient: impatient, before: func(s step, _ []string) {
				if s == obtain && armed {
					hung.Do(func() {
						stopped <- server.Stop()
						awaitStop(t, server.Pid)
					})
				}
			}}
			l := open(t, p.Name, tokenbucket.NewRedisStore(tap, tokenbucket.WithKeyPrefix(p.Prefix), tokenbucket.WithLockTTL(ttl)))
			ok, err := l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			require.True(t, ok)
			require.NoError(t, redistest.Poll(30*time.Second, func() error { // so that no other command has the client's connection
				if _, err := l.State(background); err != nil || tap.reviewed.Load() {
					return err
				}
				return errors.New("the store has not asked whether the server evicts")
			}))
			others := p.open("script", ttl)
			_, err = others.State(background)
			require.NoError(t, err)
			before := p.sets()

			armed = true
			var began time.Time
			for len(stopped) == 0 { // until a call has got as far as that within its patience
				ctx, cancel := context.WithTimeout(background, patience)
				began = time.Now()
				_, err = l.TryAcquire(ctx, 1, 0)
				cancel()
			}
			within(t, "the caller went away after", time.Since(began), patience+50*time.Millisecond, late)
			require.Error(t, err) // its deadline's, or the client's
			require.NoError(t, <-stopped)
			time.Sleep(time.Until(began.Add(hang)))
			require.NoError(t, server.Continue())
			continued := time.Now()
			ok, err = others.TryAcquire(background, 1, 0)
			took := time.Since(continued)
			require.NoError(t, err)
			require.True(t, ok)
			within(t, "the script store was served after", took, ttl, late)
			p.unlocked(ttl, late)
			time.Sleep(50 * time.Millisecond) // for whatever still comes
			p.taken(2)
			require.GreaterOrEqual(t, p.sets()-before, 2, "the server did not even try to obtain the lock")
		})
	}
}

// under gives each batch of a store a context of the test's.
type under struct {
	tokenbucket.Store
	ctx context.Context
}

func (s *under) Apply(_ context.Context, b *tokenbucket.Batch) error { return s.Store.Apply(s.ctx, b) }

// take takes one permit by a store of the lock, each batch under a context, and without the fallbacks of a limiter that goes on.
func (p *place) take(ctx context.Context, store tokenbucket.Store) error {
	l, err := tokenbucket.NewSmoothBursty(p.Name, 1.0/86_400, tokenbucket.WithStore(&under{store, ctx}), tokenbucket.WithMaxPermits(permits),
		tokenbucket.WithInitialPermits(permits), tokenbucket.WithStoreTimeout(30*time.Second))
	require.NoError(p.t, err)
	ok, err := l.TryAcquire(background, 1, 0)
	require.Equal(p.t, err == nil, ok)
	return err
}

// A context that ends while its batch holds the lock does not keep the lock: it is released within 100 ms, whatever its time to live.
// Without a commit nothing is taken, and a caller that leaves gets its permit refunded.
func TestC4ContextEndsWhileHolding(t *testing.T) {
	server := redistest.Start(t)
	late := faultlab.MeasureTrips(t, server.Addr)
	const ttl, most = 30 * time.Second, 100 * time.Millisecond
	for _, when := range []step{obtain, read, commit} {
		t.Run(fmt.Sprint("the store's, after ", when), func(t *testing.T) {
			p := newPlace(t, server)
			ctx, cancel := context.WithCancel(background)
			defer cancel()
			held := ""
			tap := &tapped{RedisClient: p.Client, after: func(s step, _ redis.Cmder) {
				if s == when {
					held = p.holder()
					cancel()
				}
			}}
			store := tokenbucket.NewRedisStore(tap, tokenbucket.WithKeyPrefix(p.Prefix), tokenbucket.WithLockTTL(ttl))
			err := p.take(ctx, store)
			p.unlocked(most, late)
			if when == commit { // it is done
				require.NoError(t, err)
				p.taken(1)
				return
			}
			require.ErrorIs(t, err, context.Canceled)
			require.NotEmpty(t, held, "it held the lock")
			require.Empty(t, p.text(), "nothing was written")
		})
	}
	for _, when := range []step{obtain, read, commit} {
		t.Run(fmt.Sprint("a caller's, after ", when), func(t *testing.T) {
			p := newPlace(t, server)
			stay := p.open("lock", ttl)
			ok, err := stay.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			require.True(t, ok)
			ctx, cancel := context.WithCancel(background)
			defer cancel()
			gone, ended := make(chan struct{}), false
			tap := &tapped{RedisClient: p.Client, after: func(s step, _ redis.Cmder) {
				if s == when && !ended {
					ended = true
					cancel()
					<-gone // the caller does not wait for the store
				}
			}}
			l := open(t, p.Name, tokenbucket.NewRedisStore(tap, tokenbucket.WithKeyPrefix(p.Prefix), tokenbucket.WithLockTTL(ttl)))
			_, err = l.Acquire(ctx, 1)
			close(gone)
			require.ErrorIs(t, err, context.Canceled)
			p.unlocked(most, late)
			require.NoError(t, redistest.Poll(20*time.Second, func() error {
				if b := p.state(); b.StoredPermits < permits-1 {
					return fmt.Errorf("%v permits are left of %v: one is lost", b.StoredPermits, permits)
				}
				return nil
			}))
			require.Less(t, p.state().StoredPermits, permits-0.99, "and none came of it")
			p.unlocked(most, late)
		})
	}
}

// Whatever a former holder of the lock sends again, releases above all, another holder's lock stays, and so does the bucket.
func TestC5ReplayedReleases(t *testing.T) {
	p := newPlace(t, redistest.Start(t))
	var mu sync.Mutex
	sent := map[step][][]string{}
	ctx, cancel := context.WithCancel(background)
	defer cancel()
	last := false
	tap := &tapped{RedisClient: p.Client, before: func(s step, args []string) {
		mu.Lock()
		defer mu.Unlock()
		sent[s] = append(sent[s], args)
	}, after: func(s step, _ redis.Cmder) {
		if s == read && last {
			cancel()
		}
	}}
	store := tokenbucket.NewRedisStore(tap, tokenbucket.WithKeyPrefix(p.Prefix), tokenbucket.WithLockTTL(10*time.Second))
	for range 3 {
		err := p.take(background, store)
		require.NoError(t, err)
	}
	last = true
	err := p.take(ctx, store) // and one that ends with a release
	require.ErrorIs(t, err, context.Canceled)
	late := faultlab.MeasureLateness(t)
	p.unlocked(100*time.Millisecond, late)

	require.NoError(t, p.Set(background, p.lock(), "somebody else", time.Minute).Err())
	before := p.text()
	mu.Lock()
	defer mu.Unlock()
	for _, s := range []step{obtain, read, commit, release} {
		require.NotEmpty(t, sent[s], s)
		for range 2 {
			for _, args := range sent[s] {
				all := make([]any, len(args))
				for i := range args {
					all[i] = args[i]
				}
				if err := p.Do(background, all...).Err(); err != redis.Nil {
					require.True(t, err == nil || redis.HasErrorPrefix(err, "NOSCRIPT"), "%v", err)
				}
				require.Equal(t, "somebody else", p.holder(), "%v", args)
				require.Greater(t, p.PTTL(background, p.lock()).Val(), 30*time.Second, "%v", args)
				require.Equal(t, before, p.text(), "%v", args)
			}
		}
	}
	faultlab.Figure(t, "releases sent twice again, without effect", len(sent[release]))
	t.Logf("replayed twice: %d obtains, %d reads, %d commits, %d releases", len(sent[obtain]), len(sent[read]), len(sent[commit]), len(sent[release]))
}

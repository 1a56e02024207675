package tokenbucket

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// states reads and writes the states of buckets behind their limiters' backs.
type states struct {
	memory *MemoryStore
	client *redis.Client
	store  Store
}

// save returns a function that brings the present state of a limiter's bucket back.
func (s states) save(t *testing.T, l *RateLimiter) (restore func()) {
	if s.memory != nil {
		b := s.memory.bucket(keyName(l.Name()), 0)
		state := b.state
		return func() { b.state = state }
	}
	key := keyIn(s.store, l.Name())
	text, err := s.client.Get(background, key).Result()
	require.NoError(t, err)
	return func() { require.NoError(t, s.client.Set(background, key, text, time.Hour).Err()) }
}

// lose deletes the state of a limiter's bucket.
func (s states) lose(t *testing.T, l *RateLimiter) {
	if s.memory != nil {
		s.memory.bucket(keyName(l.Name()), 0).state = PermitBucket{}
		return
	}
	require.NoError(t, s.client.Del(background, keyIn(s.store, l.Name())).Err())
}

// A settlement gives permits back only to the bucket that has granted them, and that was not full since. A charge counts in any.
func TestSettlementsOfOtherEpochs(t *testing.T) {
	client := redistest.Shared(t).Client(t)
	memory := NewMemoryStore()
	at := map[string]states{"memory": {memory: memory, store: memory}}
	for which, store := range redisStores(client, WithKeyPrefix(prefixOf(t)), WithLocalTime()) {
		at[which] = states{client: client, store: store}
	}
	each := func(do func(t *testing.T, l *RateLimiter)) func(*testing.T, states, *clockwork.FakeClock, *payer) {
		return func(t *testing.T, _ states, _ *clockwork.FakeClock, p *payer) {
			for _, l := range p.members {
				do(t, l)
			}
		}
	}
	for _, event := range []struct {
		name  string
		kept  bool // the permits come back
		begin func(t *testing.T, s states, clock *clockwork.FakeClock, p *payer)
	}{
		{"none", true, each(func(*testing.T, *RateLimiter) {})},
		{"penalty", true, each(func(t *testing.T, l *RateLimiter) { require.NoError(t, l.Penalize(background, time.Millisecond)) })},
		{"rate", true, each(func(t *testing.T, l *RateLimiter) { require.NoError(t, l.SetRate(background, 0.02)) })},
		{"configuration", true, each(func(t *testing.T, l *RateLimiter) {
			other, err := NewSmoothBursty(l.Name(), 0.03, WithStore(l.store), WithClock(l.limiter.Coordinator.Clock), WithMaxPermits(2000))
			require.NoError(t, err)
			_, err = other.Acquire(background, 1)
			require.NoError(t, err)
		})},
		{"reset", false, each(func(t *testing.T, l *RateLimiter) { require.NoError(t, l.Reset(background)) })},
		{"lost", false, func(t *testing.T, s states, _ *clockwork.FakeClock, p *payer) {
			for _, l := range p.members {
				s.lose(t, l)
			}
		}},
		{"full", false, func(t *testing.T, _ states, clock *clockwork.FakeClock, p *payer) {
			clock.Advance(100_000 * time.Second) // 1000 permits
			h, err := p.reserve(150)             // others use them
			require.NoError(t, err)
			require.True(t, h.OK())
		}},
	} {
		for which, s := range at {
			for members, what := range map[int]string{1: "limiter", 2: "group"} {
				t.Run(fmt.Sprint(event.name, "/", which, "/", what), func(t *testing.T) {
					clock := clockwork.NewFakeClockAt(time.UnixMicro(1_700_000_000_000_000))
					p := newPayer(t, rand.New(rand.NewPCG(rand.Uint64(), 1)), members, func(int) (float64, []Option) {
						return 0.01, []Option{WithStore(s.store), WithClock(clock), WithMaxPermits(1000), WithInitialPermits(400), patient, Logged(t)}
					})
					less, err := p.reserve(100)
					require.NoError(t, err)
					more, err := p.reserve(10)
					require.NoError(t, err)
					event.begin(t, s, clock, p)
					before := p.owed(t)
					require.NoError(t, less.Settle(background, 20))
					for m, owed := range p.owed(t) {
						if want := -80.0 * float64(p.weights[m]); event.kept {
							assert.InDelta(t, want, owed-before[m], 1e-6)
						} else {
							assert.InDelta(t, 0, owed-before[m], 1e-6)
						}
					}
					before = p.owed(t)
					require.NoError(t, more.Settle(background, 30))
					for m, owed := range p.owed(t) {
						assert.InDelta(t, 20*float64(p.weights[m]), owed-before[m], 1e-6)
					}
				})
			}
		}
	}
	for which, s := range at {
		t.Run("older state/"+which, func(t *testing.T) {
			clock := clockwork.NewFakeClockAt(time.UnixMicro(1_700_000_000_000_000))
			l, err := NewSmoothBursty("older", 0.01, WithStore(s.store), WithClock(clock), WithMaxPermits(1000), WithInitialPermits(400), patient)
			require.NoError(t, err)
			for _, verb := range []func() (*Reservation, error){
				func() (*Reservation, error) { return l.Reserve(background, 100) },
				func() (*Reservation, error) { return l.TryAwait(background, 100, 0) },
			} {
				known, err := verb()
				require.NoError(t, err)
				restore := s.save(t, l)
				unknown, err := verb()
				require.NoError(t, err)
				restore()
				before := settles(t, l)
				require.NoError(t, unknown.Settle(background, 0))
				require.InDelta(t, before, settles(t, l), 1e-6)
				require.NoError(t, known.Settle(background, 0))
				require.InDelta(t, before-100, settles(t, l), 1e-6)
			}
		})
	}
}

package input

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// I4: a state of a later format is refused by whatever is asked, says so, and stays to the byte, while this release goes on with
// the states that it understands. When the fleet has gone back to this format, so does the bucket.
func TestI4LaterFormat(t *testing.T) {
	for which, store := range faultlab.Stores {
		t.Run(which, func(t *testing.T) {
			client := redistest.Start(t).Client(t, patient)
			s := store(client)
			later, err := tokenbucket.NewSmoothBursty("later", 5, tokenbucket.WithStore(s), tokenbucket.WithStoreTimeout(limit))
			require.NoError(t, err)
			_, err = later.Reserve(ctx, 100)
			require.NoError(t, err)
			const key = "tokenbucket:{later}"
			ours := client.Get(ctx, key).Val()
			for _, format := range []string{"tb2", "tb10", "tb99", "tb4294967296"} {
				theirs := strings.Replace(ours, "tb1", format, 1) + " more=1"
				require.NoError(t, client.Set(ctx, key, theirs, time.Hour).Err())
				for verb, ask := range verbs(later) {
					if verb == "Try" { // which may be refused without asking: the bucket was empty
						continue
					}
					err := ask()
					require.ErrorIs(t, err, tokenbucket.ErrCorruptState, verb)
					require.ErrorContains(t, err, format+" was written by another release", verb)
					require.ErrorContains(t, err, "tb1", verb)
				}
				require.Equal(t, theirs, client.Get(ctx, key).Val())
				require.Greater(t, client.PTTL(ctx, key).Val(), 50*time.Minute)
			}
			other, err := tokenbucket.NewSmoothBursty("other", 5, tokenbucket.WithStore(s), tokenbucket.WithStoreTimeout(limit))
			require.NoError(t, err)
			ok, err := other.Try(ctx)
			require.NoError(t, err)
			require.True(t, ok)

			require.NoError(t, client.Set(ctx, key, ours, time.Hour).Err())
			b, err := later.State(ctx)
			require.NoError(t, err)
			require.Greater(t, b.NextFreeTicketMicros-b.SeenMicros, int64(10_000_000), "a debt of 100 permits at 5/s, less what has passed")
		})
	}
}

// I4: what the first release wrote is read, with and without a hold, bursty and warming up. These texts are literal, so that they
// stay what they are when the code that writes them changes.
func TestI4OldestFormat(t *testing.T) {
	now := time.Now().UnixMicro()
	for which, store := range faultlab.Stores {
		t.Run(which, func(t *testing.T) {
			client := redistest.Start(t).Client(t, patient)
			open := func(name string) *tokenbucket.RateLimiter {
				l, err := tokenbucket.NewSmoothBursty(name, 100, tokenbucket.WithMaxPermits(50), tokenbucket.WithStore(store(client)),
					tokenbucket.WithStoreTimeout(limit))
				require.NoError(t, err)
				return l
			}
			put := func(name, text string, v ...any) {
				require.NoError(t, client.Set(ctx, "tokenbucket:{"+name+"}", fmt.Sprintf(text, v...), time.Hour).Err())
			}
			put("debt", "tb1 epoch=8239 seq=12 tail=12 stored=0 next=%d carry=0.5 debt=3600000000 back=0: bursty now 100 50 1 0", now+3_600_000_000)
			b, err := open("debt").State(ctx)
			require.NoError(t, err)
			require.Equal(t, now+3_600_000_000, b.NextFreeTicketMicros)
			require.EqualValues(t, []any{int64(8239), int64(12), int64(12), 0.5, 0.0}, []any{b.Epoch, b.Seq, b.Tail, b.CarryMicros, b.StoredPermits})
			r, err := open("debt").TryReserve(ctx, 1, time.Minute)
			require.NoError(t, err)
			require.False(t, r.OK(), "an hour of debt is an hour of debt")
			require.Contains(t, client.Get(ctx, "tokenbucket:{debt}").Val(), "seq=12 ", "a refusal writes nothing")

			put("idle", "tb1 epoch=8239 seq=12 tail=12 stored=4.5 next=1700000000000000 carry=0 debt=0 back=2.5:3,4 bursty now 100 50 1 0")
			b, err = open("idle").State(ctx)
			require.NoError(t, err)
			require.Equal(t, 50.0, b.StoredPermits, "full, after years")
			ok, err := open("idle").TryAcquire(ctx, 50, 0)
			require.NoError(t, err)
			require.True(t, ok)
			require.Regexp(t, `^tb1 epoch=\d+ seq=13 `, client.Get(ctx, "tokenbucket:{idle}").Val(), "its count goes on")

			put("held", "tb1 epoch=8239 seq=12 tail=0 stored=0 next=%d carry=0 debt=60000000 back=0: hold=%d:60000000 bursty now 100 50 1 0",
				now+60_000_000, now+60_000_000)
			b, err = open("held").State(ctx)
			require.NoError(t, err)
			require.Equal(t, now+60_000_000, b.HeldUntilMicros)
			require.EqualValues(t, 60_000_000, b.PausedMicros)

			put("newer", "tb1 epoch=8239 seq=12 tail=12 stored=0 next=%d carry=0 debt=0 back=0: bursty now 7 50 1 9", now)
			b, err = open("newer").State(ctx)
			require.NoError(t, err)
			require.Equal(t, 7.0, b.Rate, "the newest version wins")
			require.EqualValues(t, 9, b.Version)

			put("warm", "tb1 epoch=8239 seq=12 tail=12 stored=30 next=%d carry=0.25 debt=0 back=0: warmup later 5 4000000 3 0", now)
			warm, err := tokenbucket.NewSmoothWarmingUp("warm", 5, 4*time.Second, tokenbucket.WithStore(store(client)), tokenbucket.WithStoreTimeout(limit))
			require.NoError(t, err)
			b, err = warm.State(ctx)
			require.NoError(t, err)
			require.EqualValues(t, 4_000_000, b.WarmupMicros)
			require.Equal(t, b.MaxPermits, b.StoredPermits, "more than there can be is clipped")
			ok, err = warm.TryAcquire(ctx, 1, 0)
			require.NoError(t, err)
			require.True(t, ok)
		})
	}
	t.Run("window", func(t *testing.T) {
		client := redistest.Start(t).Client(t, patient)
		key := "slidingwindow:{x}:1h0m0s"
		open := func(opts ...slidingwindow.Option) *slidingwindow.Limiter {
			l, err := slidingwindow.New("x", 20, time.Hour, time.Minute, append(opts, slidingwindow.WithRedis(client), slidingwindow.WithStoreTimeout(limit))...)
			require.NoError(t, err)
			return l
		}
		require.NoError(t, client.Set(ctx, key, fmt.Sprintf("sw1 epoch=734561 seen=%d %d:17", now, now), time.Hour).Err())
		n, err := open().Remaining(ctx)
		require.NoError(t, err)
		require.Equal(t, 3, n)
		ok, err := open().AllowN(ctx, 4)
		require.NoError(t, err)
		require.False(t, ok)
		later := "sw2 everything=else"
		require.NoError(t, client.Set(ctx, key, later, time.Hour).Err())
		_, err = open(slidingwindow.WithFailurePolicy(slidingwindow.FailOpen)).Allow(ctx)
		require.ErrorIs(t, err, slidingwindow.ErrCorruptState)
		require.Equal(t, later, client.Get(ctx, key).Val())
	})
	t.Run("semaphore", func(t *testing.T) {
		client := redistest.Start(t).Client(t, patient)
		base := "semaphore:{x}:"
		expires := float64(now + 3_600_000_000)
		require.NoError(t, client.HSet(ctx, base+"state", "fence", now, "ticket", 0, "used", 1, "seen", now, "permits", "2 0 0", "lives", now+172_800_000_000).Err())
		require.NoError(t, client.Do(ctx, "ZADD", base+"held", fmt.Sprintf("%.0f", expires), "p-1").Err())
		require.NoError(t, client.HSet(ctx, base+"info", "p-1", fmt.Sprintf("1 p %d %d a host", now, now)).Err())
		s, err := semaphore.NewRedis(client, "x", 1, semaphore.WithStoreTimeout(limit))
		require.NoError(t, err)
		defer func() { require.NoError(t, s.Close(ctx)) }()
		held, err := s.Holders(ctx)
		require.NoError(t, err)
		require.Equal(t, []semaphore.Holder{{ID: "p-1", Permits: 1, Fence: now, Since: time.UnixMicro(now), Expires: time.UnixMicro(int64(expires)), Label: "a host"}}, held)
		_, err = s.TryAcquire(ctx, 1, 0)
		require.ErrorIs(t, err, semaphore.ErrRefused, "it is held")
		require.NoError(t, semaphore.NewGroup(s).Done(ctx, "p-1"))
		p, err := s.TryAcquire(ctx, 1, 0)
		require.NoError(t, err)
		require.Greater(t, p.Fence(), now)
	})
}

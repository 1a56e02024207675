package registry_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// confirmations are those of a fleet, without a place.
type confirmations struct {
	mu   sync.Mutex
	last registry.Confirmation
	at   time.Time
	err  error
}

func (c *confirmations) Last(context.Context) (registry.Confirmation, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	last := c.last
	last.Age = time.Since(c.at)
	return last, c.err
}

func (c *confirmations) Confirm(_ context.Context, who, why string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err == nil {
		c.last, c.at = registry.Confirmation{ID: fmt.Sprint(time.Now().UnixNano()), Who: who, Why: why}, time.Now()
	}
	return c.err
}

func rows(from, to int) (limits []registry.Limit) {
	for i := from; i < to; i++ {
		limits = append(limits, row(fmt.Sprintf("/%02d", i), 1, 1))
	}
	return limits
}

// A table of 17 rows that is reduced to one, or emptied: the loss is believed after three loads, and reported until it is confirmed.
func TestLossIsReportedUntilItIsConfirmed(t *testing.T) {
	for left := range 2 {
		synctest.Test(t, func(t *testing.T) {
			var log logged
			source, shared := &fake{}, &confirmations{}
			source.set(rows(0, 17)...)
			r := open(t, source, tokenbucket.NewMemoryStore(), log.option(), registry.WithInterval(5*time.Second), registry.WithConfirmations(shared))
			defer r.Close()
			other := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(5*time.Second), registry.WithConfirmations(shared))
			defer other.Close()
			require.Zero(t, r.Stats().Loss)
			require.Error(t, shared.failWith(errors.New("away")).Confirm(ctx, "ann", "too early"))
			source.set(rows(0, left)...)
			gone := time.Now()
			for _, c := range []struct {
				at     time.Duration
				limits int
				held   bool
			}{{5001 * time.Millisecond, 17, true}, {15 * time.Second, left, false}, {61 * time.Second, left, false}, {301 * time.Second, left, false}} {
				time.Sleep(time.Until(gone.Add(c.at)))
				s := r.Stats()
				require.Equal(t, c.limits, s.Limits, c.at)
				require.Equal(t, []any{17, 17 - left, c.held}, []any{s.Loss.Before, s.Loss.Gone, s.Loss.Held}, c.at)
				require.WithinRange(t, s.Loss.Since, gone, gone.Add(5*time.Second))
				require.Len(t, s.Loss.Names, 17-left)
				require.Equal(t, "/16", s.Loss.Names[16-left])
			}
			require.Equal(t, 5, strings.Count(log.String(), "confirmations of lost limits cannot be read"), "once a minute")
			require.Equal(t, 5, strings.Count(log.String(), "no longer in force; confirm the loss, or restore the rows"), "once a minute")
			require.NoError(t, shared.failWith(nil).Confirm(ctx, "ann", "moved elsewhere"))
			time.Sleep(1001 * time.Millisecond)
			require.Zero(t, r.Stats().Loss)
			require.Zero(t, other.Stats().Loss)
			require.Equal(t, left, r.Stats().Limits)
			require.Contains(t, log.String(), fmt.Sprintf(`the loss of limits was confirmed" gone=%d of=17 by=ann why="moved elsewhere"`, 17-left))
			source.set(rows(20, 30)...)
			time.Sleep(30 * time.Second)
			require.Equal(t, left, r.Stats().Loss.Before, "a further loss is one of its own")
		})
	}
}

func (c *confirmations) failWith(err error) *confirmations {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
	return c
}

// Rows that come back end a loss that was believed, if no more than half of them stay away.
func TestLossEndsWhenTheRowsAreBack(t *testing.T) {
	var log logged
	source := &fake{}
	source.set(rows(0, 17)...)
	r := open(t, source, tokenbucket.NewMemoryStore(), log.option(), registry.WithInterval(time.Hour))
	load := func(limits ...registry.Limit) registry.Loss {
		source.set(limits...)
		require.NoError(t, r.Reload(ctx))
		return r.Stats().Loss
	}
	for range 3 {
		load(rows(0, 1)...)
	}
	require.Equal(t, 16, r.Stats().Loss.Gone)
	require.False(t, r.Stats().Loss.Held)
	require.Equal(t, 9, load(rows(0, 8)...).Gone)
	require.Equal(t, 17, load(rows(0, 8)...).Before)
	require.Zero(t, load(rows(0, 9)...))
	require.Equal(t, 1, strings.Count(log.String(), "the limits that were gone from the table are back"))
	require.Zero(t, load(rows(0, 9)...))
}

// Two unconfirmed losses are one, of the number of limits before the first.
func TestLossesAddUp(t *testing.T) {
	source := &fake{}
	source.set(rows(0, 17)...)
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
	for _, left := range []int{5, 5, 5, 0} {
		source.set(rows(0, left)...)
		require.NoError(t, r.Reload(ctx))
	}
	l := r.Stats().Loss
	require.Equal(t, []any{17, 17, true}, []any{l.Before, l.Gone, l.Held})
	require.Equal(t, 5, r.Stats().Limits)
}

// WithConfirmedLosses never believes a loss by itself; a confirmation does at once.
func TestLossIsNeverBelieved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log logged
		source, shared := &fake{}, &confirmations{}
		source.set(rows(0, 17)...)
		r := open(t, source, tokenbucket.NewMemoryStore(), log.option(), registry.WithInterval(5*time.Second), registry.WithConfirmations(shared),
			registry.WithConfirmedLosses())
		defer r.Close()
		source.set()
		time.Sleep(time.Hour)
		require.Equal(t, 17, r.Stats().Limits)
		require.True(t, r.Stats().Loss.Held)
		require.Equal(t, 1, strings.Count(log.String(), "until the loss is confirmed"))
		require.NoError(t, shared.Confirm(ctx, "ann", "meant"))
		time.Sleep(1001 * time.Millisecond)
		require.Zero(t, r.Stats().Limits)
		require.Zero(t, r.Stats().Loss)
	})
	_, err := registry.New(&fake{}, tokenbucket.NewMemoryStore(), registry.WithConfirmedLosses(), registry.WithAllowEmpty())
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
}

// A confirmation counts for a loss that a process finds soon after it, and for no later one; once.
func TestConfirmationBeforeTheLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source, shared := &fake{}, &confirmations{}
		source.set(rows(0, 17)...)
		r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(5*time.Second), registry.WithConfirmations(shared))
		defer r.Close()
		require.NoError(t, shared.Confirm(ctx, "ann", "meant"))
		source.set(rows(0, 8)...)
		time.Sleep(7 * time.Second)
		require.Zero(t, r.Stats().Loss)
		require.Equal(t, 8, r.Stats().Limits)
		source.set(rows(0, 1)...)
		time.Sleep(time.Minute)
		require.Equal(t, 7, r.Stats().Loss.Gone, "it has counted once")
		require.NoError(t, shared.Confirm(ctx, "ann", "meant"))
		time.Sleep(time.Minute)
		require.Zero(t, r.Stats().Loss)
		source.set()
		time.Sleep(time.Minute)
		require.Equal(t, 1, r.Stats().Loss.Gone, "it is too old")
	})
}

// Without a place for confirmations, that of a process is its own.
func TestConfirmWithoutAPlace(t *testing.T) {
	source := &fake{}
	source.set(rows(0, 2)...)
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
	require.NoError(t, r.Confirm(ctx, "ann", "there is nothing to confirm"))
	source.set()
	require.NoError(t, r.Reload(ctx))
	require.True(t, r.Stats().Loss.Held)
	require.NoError(t, r.Confirm(ctx, "ann", "meant"))
	require.Zero(t, r.Stats().Loss)
	require.Zero(t, r.Stats().Limits)
	_, err := registry.New(source, tokenbucket.NewMemoryStore(), registry.WithConfirmations(nil))
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
}

// Confirmations in a real Redis: each is another one, and its age is by the clock of Redis.
func TestRedisConfirmations(t *testing.T) {
	client := redistest.Start(t).Client(t)
	c, err := registry.NewRedisConfirmations(client, "tokenbucket:confirmed")
	require.NoError(t, err)
	last, err := c.Last(ctx)
	require.NoError(t, err)
	require.Empty(t, last.ID)
	require.NoError(t, c.Confirm(ctx, "ann", "meant"))
	one, err := c.Last(ctx)
	require.NoError(t, err)
	require.Equal(t, []string{"ann", "meant"}, []string{one.Who, one.Why})
	require.Less(t, one.Age, time.Hour)
	require.GreaterOrEqual(t, one.Age, time.Duration(0))
	require.NoError(t, c.Confirm(ctx, "ann", "meant"))
	two, err := c.Last(ctx)
	require.NoError(t, err)
	require.NotEqual(t, one.ID, two.ID)
	require.NoError(t, client.PExpire(ctx, "tokenbucket:confirmed", 23*time.Hour).Err())
	two, err = c.Last(ctx)
	require.NoError(t, err)
	require.GreaterOrEqual(t, two.Age, time.Hour)
	require.NoError(t, client.Set(ctx, "tokenbucket:confirmed", "yes", 0).Err())
	_, err = c.Last(ctx)
	require.ErrorContains(t, err, `key "tokenbucket:confirmed"`)
	require.NoError(t, client.Close())
	require.Error(t, c.Confirm(ctx, "ann", "meant"))
	for _, err := range []error{second(registry.NewRedisConfirmations((*redis.Client)(nil), "k")), second(registry.NewRedisConfirmations(client, ""))} {
		require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	}
}

func second[T any](_ T, err error) error { return err }

// A rename of all rows that is repaired is no loss any more, whether it was believed meanwhile or not. The new names are not reported.
func TestRenameThatIsRepairedIsNoLoss(t *testing.T) {
	for loads := range 6 {
		t.Run(fmt.Sprint(loads, " loads with the new names"), func(t *testing.T) {
			source := &fake{}
			source.set(rows(0, 10)...)
			r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
			source.set(rows(50, 60)...)
			for range loads {
				require.NoError(t, r.Reload(ctx))
				require.Equal(t, 10, r.Stats().Loss.Gone)
				require.Equal(t, "/00", r.Stats().Loss.Names[0])
			}
			source.set(rows(0, 10)...)
			require.NoError(t, r.Reload(ctx))
			require.Zero(t, r.Stats().Loss)
			require.Equal(t, 10, r.Stats().Limits)
			require.True(t, r.Has("/00"))
			require.False(t, r.Has("/50"))

			source.set(rows(0, 1)...) // a loss of these is found as before
			require.NoError(t, r.Reload(ctx))
			require.Equal(t, 9, r.Stats().Loss.Gone)
			require.Equal(t, 10, r.Stats().Limits)
		})
	}
}

// The new names of a rename that was not repaired may be lost, too: the loss grows.
func TestLossAfterRename(t *testing.T) {
	source := &fake{}
	source.set(rows(0, 10)...)
	r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithInterval(time.Hour))
	source.set(rows(50, 60)...)
	for range 3 {
		require.NoError(t, r.Reload(ctx))
	}
	require.False(t, r.Stats().Loss.Held)
	source.set()
	require.NoError(t, r.Reload(ctx))
	require.Equal(t, 20, r.Stats().Loss.Gone)
	require.True(t, r.Stats().Loss.Held)
	require.Equal(t, 10, r.Stats().Limits)
}

package registry_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

var _ gate.CostGate = (*registry.Registry)(nil)

// costing enters a call of /a that costs n permits.
func costing(t *testing.T, r *registry.Registry, n int) *gate.Admission {
	t.Helper()
	a, err := gate.AskN(ctx, r, "/a", n)
	require.NoError(t, err)
	return a
}

// A call takes its cost of the rate and of the window, and one place. If one of them refuses it, it holds nothing of the others.
func TestEnterN(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := openLocal(t, registry.Static{bounded("/a", func(l *registry.Limit) {
			size := 100.0
			l.Rate, l.Burst, l.MaxWait = 10, &size, 0
			l.Window, l.WindowLimit, l.Concurrent = time.Hour, 50, 2
		})})
		used := func() (stored float64, window, inside int) {
			l, err := r.Limiter("/a")
			require.NoError(t, err)
			b, err := l.State(ctx)
			require.NoError(t, err)
			u, _, err := r.Usage(ctx, "/a")
			require.NoError(t, err)
			return b.StoredPermits, u.WindowUsed, u.Inside
		}
		first := costing(t, r, 1)
		require.True(t, first.OK)
		time.Sleep(10 * time.Second)
		second := costing(t, r, 40)
		require.True(t, second.OK)
		stored, window, inside := used()
		require.Equal(t, []any{60.0, 41, 2}, []any{stored, window, inside})

		require.Equal(t, gate.ByConcurrency, costing(t, r, 5).By, "whatever it costs, a call has one place")
		second.Leave()
		full := costing(t, r, 10)
		require.Equal(t, gate.ByWindow, full.By)
		require.False(t, full.OK)
		require.InDelta(t, time.Hour, full.RetryAfter, float64(time.Minute))
		rate := costing(t, r, 9)
		require.True(t, rate.OK)
		rate.Leave()
		stored, window, inside = used()
		require.Equal(t, []any{51.0, 50, 1}, []any{stored, window, inside}, "refused calls have taken nothing")
		first.Leave()
		r.Close()
	})
}

// A penalty that begins shortly before the permits are due takes the whole cost out of the window until then.
func TestCostIsPostponed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := openLocal(t, registry.Static{bounded("/a", func(l *registry.Limit) {
			l.Rate, l.Burst, l.MaxWait, l.Window, l.WindowLimit, l.Concurrent = 10, nil, time.Minute, time.Hour, 50, 1
		})})
		began := time.Now()
		used := func() [2]int {
			u, _, err := r.Usage(ctx, "/a")
			require.NoError(t, err)
			return [2]int{u.WindowUsed, u.Inside}
		}
		done := make(chan *gate.Admission)
		go func() {
			a, err := r.EnterN(ctx, "/a", 11) // a new bucket has one permit
			require.NoError(t, err)
			done <- a
		}()
		time.Sleep(time.Second - 5*time.Millisecond)
		require.Equal(t, [2]int{11, 1}, used(), "a lead before")
		require.NoError(t, r.Penalize(ctx, "/a", 10*time.Second))
		time.Sleep(time.Second)
		require.Equal(t, [2]int{0, 0}, used())
		a := <-done
		require.True(t, a.OK)
		require.InDelta(t, 11*time.Second, time.Since(began), float64(20*time.Millisecond))
		require.Equal(t, [2]int{11, 1}, used())
		a.Leave()
		r.Close()
	})
}

// A cost that the row can never grant is an error, whichever limit could not.
func TestNeverGranted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		row := func(change func(*registry.Limit)) *registry.Registry {
			return openLocal(t, registry.Static{bounded("/a", func(l *registry.Limit) { l.Burst, l.WindowLimit = nil, 5 }, change)})
		}
		for name, c := range map[string]struct {
			change func(*registry.Limit)
			cost   int
			want   error
			text   string
		}{
			"window":         {func(l *registry.Limit) { l.Rate = 100 }, 6, tokenbucket.ErrNeverGranted, `key "/a": cost 6: want 1 to the limit of the window, 5`},
			"window alone":   {func(l *registry.Limit) { l.NoRate, l.Rate = true, 0 }, 6, tokenbucket.ErrNeverGranted, `cost 6: want 1 to the limit of the window, 5`},
			"rate":           {func(l *registry.Limit) { l.Rate, l.MaxWait, l.WindowLimit = 10, 500*time.Millisecond, 100 }, 16, tokenbucket.ErrNeverGranted, "permits 16: want a timeout of at least 600ms"},
			"rate alone":     {func(l *registry.Limit) { *l = registry.Limit{Name: "/a", Rate: 10} }, 11, tokenbucket.ErrNeverGranted, "permits 11: want a timeout of at least 100ms"},
			"quota":          {func(l *registry.Limit) { *l = registry.Limit{Name: "/a", Rate: 10, Quota: true} }, 2, tokenbucket.ErrInvalidPermits, "permits 2: want 1"},
			"nothing passes": {func(l *registry.Limit) { *l = registry.Limit{Name: "/a"} }, -1, tokenbucket.ErrInvalidPermits, "cost -1: want"},
		} {
			r := row(c.change)
			_, err := gate.AskN(ctx, r, "/a", c.cost)
			require.ErrorIs(t, err, c.want, name)
			require.ErrorContains(t, err, c.text, name)
			require.True(t, errors.As(err, new(*gate.CostError)), name)
			require.Empty(t, r.Stats().Faults, "a cost is no fault of the row")
			require.Equal(t, c.cost > 0, costing(t, r, 1).OK, "nothing was taken: "+name)
			r.Close()
		}
		for _, n := range []int{0, -3} {
			r := row(func(*registry.Limit) {})
			_, err := r.EnterN(ctx, "/a", n)
			var wrong *gate.CostError
			require.ErrorAs(t, err, &wrong)
			require.Equal(t, gate.CostError{Key: "/a", Cost: n, Want: "1 or more", Err: tokenbucket.ErrInvalidPermits}, *wrong)
			r.Close()
		}
		r := row(func(l *registry.Limit) { l.Shadow = true })
		require.True(t, costing(t, r, 6).OK, "in shadow every call passes")
		r.Close()
	})
}

// A call is settled with what it has used of the rate; a call in shadow, which has taken none of it, is not.
func TestSettle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, c := range map[string]struct {
			change func(*registry.Limit)
			want   float64
		}{
			"rate":             {func(l *registry.Limit) { l.Window, l.WindowLimit, l.Concurrent = 0, 0, 0 }, 97},
			"rate and window":  {func(l *registry.Limit) {}, 97},
			"in shadow":        {func(l *registry.Limit) { l.Shadow = true }, 80},
			"rate and refused": {func(l *registry.Limit) { l.Window, l.WindowLimit = time.Hour, 1 }, 100},
		} {
			r := openLocal(t, registry.Static{bounded("/a", func(l *registry.Limit) {
				size := 100.0
				l.Rate, l.Burst, l.MaxWait, l.Window, l.WindowLimit = 100, &size, 0, time.Millisecond, 1000
			}, c.change)})
			require.True(t, costing(t, r, 1).OK)
			time.Sleep(time.Second)
			a, err := r.EnterN(ctx, "/a", 20)
			if a != nil {
				require.NoError(t, err)
				require.NoError(t, a.Settle(ctx, 3))
				a.Leave()
			}
			l, err := r.Limiter("/a")
			require.NoError(t, err)
			b, err := l.State(ctx)
			require.NoError(t, err)
			require.Equal(t, c.want, b.StoredPermits, name)
			r.Close()
		}
	})
}

package admission

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// waiting is a call in a line whose limiter stores ten permits, and a function that returns how many it stores now.
func waiting(t *testing.T, takes time.Duration) (l *line, e *early, stored func() float64) {
	limiter, err := tokenbucket.NewSmoothBursty("/a", 1, tokenbucket.WithMaxPermits(10), tokenbucket.WithInitialPermits(10))
	require.NoError(t, err)
	l = new(line)
	e = l.join(func(r *reserved) {
		time.Sleep(takes)
		r.reservation, r.err = gate.Reserve(t.Context(), limiter, 1, 0)
	})
	return l, e, func() float64 {
		synctest.Wait()
		b, err := limiter.State(context.Background())
		require.NoError(t, err)
		return b.StoredPermits
	}
}

// The first call of the line reserves its permits while a place is released. It has them once it has the place.
func TestReservedWhileAPlaceIsReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, e, stored := waiting(t, 5*time.Millisecond)
		require.Equal(t, 10.0, stored(), "it holds nothing before")
		released := l.call()
		time.Sleep(2 * time.Millisecond)
		released()
		r := e.leave()
		require.NotNil(t, r)
		began := time.Now()
		r.wait()
		require.Equal(t, 3*time.Millisecond, time.Since(began), "it has begun when the release has")
		require.NoError(t, r.err)
		require.True(t, r.reservation.OK())
		require.Equal(t, 9.0, stored())
		time.Sleep(time.Second)
		require.Equal(t, 10.0, stored(), "what falls due meanwhile")
		l.call()() // nobody is left
	})
}

// If the place goes to another process, the permits go back, and the call is the first of the line again.
func TestPlaceGoesElsewhere(t *testing.T) {
	for name, takes := range map[string]time.Duration{"reply comes first": 0, "reply comes later": 20 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			l, e, stored := waiting(t, takes)
			behind := l.join(func(*reserved) { t.Error("it is not the first") })
			l.call()()
			time.Sleep(2*shortestLead + takes)
			require.Equal(t, 10.0, stored(), name)
			l.call()()
			require.NotNil(t, e.leave(), name)
			require.Nil(t, behind.leave(), name)
			time.Sleep(time.Second)
		})
	}
}

// The permits of a call that gives up go back.
func TestGivesUpInTheLine(t *testing.T) {
	for name, takes := range map[string]time.Duration{"reply comes first": 0, "reply comes later": 20 * time.Millisecond} {
		synctest.Test(t, func(t *testing.T) {
			l, e, stored := waiting(t, takes)
			released := l.call()
			synctest.Wait()
			require.NoError(t, e.leave().drop(), name)
			released()
			time.Sleep(takes)
			require.Equal(t, 10.0, stored(), name)
			l.call()()
			require.Equal(t, 10.0, stored(), "%s: nobody is left", name)
			time.Sleep(time.Second)
		})
	}
}

// A panic of an observer reaches the call.
func TestPanicInTheLine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := new(line)
		e := l.join(func(*reserved) { panic("observer") })
		l.call()()
		r := e.leave()
		require.PanicsWithValue(t, "observer", r.wait)
		require.NoError(t, r.drop())
		time.Sleep(time.Second)
	})
}

// Calls that wait for their permits are summoned in the order in which they came.
func TestSummons(t *testing.T) {
	var a approach
	require.True(t, a.empty())
	a.summon()
	first, second, third := a.join(), a.join(), a.join()
	second.leave()
	a.summon()
	require.True(t, isClosed(first.summoned))
	require.False(t, isClosed(third.summoned))
	first.leave()
	a.summon()
	require.True(t, isClosed(third.summoned))
	require.False(t, isClosed(second.summoned))
	require.True(t, a.empty())
}

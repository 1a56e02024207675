package clock

import (
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestMono(t *testing.T) {
	before := time.Now()
	a := Mono()
	require.Positive(t, a)
	require.Zero(t, At(0).Nanosecond()%1000)
	require.Contains(t, zero.String(), "m=", "a monotonic reading")
	require.False(t, At(Mono()).Before(before))
	require.GreaterOrEqual(t, Mono(), a)
	require.Equal(t, a, Of(At(a)))
	require.WithinDuration(t, time.Now(), At(Mono()), time.Second)
	require.Equal(t, time.Duration(math.MaxInt64), Of(time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)))
	synctest.Test(t, func(t *testing.T) {
		a := Mono()
		require.Positive(t, a)
		require.WithinDuration(t, time.Now(), At(a), 0)
		time.Sleep(time.Hour)
		require.Equal(t, a+time.Hour, Mono())
	})
}

// embedded is the real clock in another type.
type embedded struct{ clockwork.Clock }

func TestLocal(t *testing.T) {
	for name, c := range map[string]clockwork.Clock{"none": nil, "real": clockwork.NewRealClock(), "embedded": embedded{clockwork.NewRealClock()}} {
		l := New(c)
		before := time.Now().UnixMicro()
		micros := l.Micros()
		require.GreaterOrEqual(t, micros, before-1, name)
		require.LessOrEqual(t, micros, time.Now().UnixMicro()+1, name)
		require.Equal(t, name != "embedded", l.System())
		require.True(t, l.InRange())
	}
	for _, at := range []time.Time{
		time.Unix(0, 0), time.Unix(-6, 0), time.Unix(0, 1000), {}, time.Date(1750, 1, 1, 0, 0, 0, 0, time.UTC),
		time.Date(2300, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(3000, 1, 1, 0, 0, 0, 0, time.UTC),
	} {
		fake := clockwork.NewFakeClockAt(at)
		l := New(fake)
		require.False(t, l.System())
		require.Equal(t, at.UnixMicro(), l.Micros(), "%v", at)
		require.Equal(t, FromMicros(at.UnixMicro()), l.Now())
		require.True(t, l.Now() > 0 || !l.InRange(), "%v", at)
		require.Equal(t, at.Year() >= 1750 && at.Year() <= 2300, l.InRange(), "%v", at)
		fake.Advance(90 * time.Second)
		require.Equal(t, at.UnixMicro()+90_000_000, l.Micros(), "%v", at)
	}
}

// set is the real clock of a machine whose wall clock is wrong: its Since is monotonic.
type set struct {
	clockwork.Clock
	by time.Duration
}

func (s *set) Now() time.Time { return time.Now().Round(0).Add(s.by) }

// A clock whose wall time is set goes on as before.
func TestLocalOfAClockThatIsSet(t *testing.T) {
	wall := &set{clockwork.NewRealClock(), 0}
	l := New(wall)
	before := l.Micros()
	for _, by := range []time.Duration{time.Hour, -time.Hour, 250 * 365 * 24 * time.Hour} {
		wall.by = by
		now := l.Micros()
		require.GreaterOrEqual(t, now, before, "%v", by)
		require.Less(t, now, before+time.Minute.Microseconds(), "%v", by)
		require.True(t, l.InRange(), "%v", by)
	}
}

// In a bubble of testing/synctest Local reads the bubble's clock.
func TestLocalInABubble(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(nil)
		before := l.Micros()
		require.Equal(t, time.Now().UnixMicro(), before)
		time.Sleep(time.Hour)
		require.Equal(t, before+3_600_000_000, l.Micros())
	})
}

// Whenever the server read its clock, and however its clock differs from the local one, it is within the bounds from then on.
func TestRemote(t *testing.T) {
	var r Remote
	require.False(t, r.Known())
	rapid.Check(t, func(t *rapid.T) {
		ahead := rapid.Int64Range(-1e18, 1e18).Draw(t, "ahead") // ns
		sent := rapid.Int64Range(-1e18, 1e18).Draw(t, "sent")
		read := sent + rapid.Int64Range(0, 1e10).Draw(t, "out")
		received := read + rapid.Int64Range(0, 1e10).Draw(t, "back")
		now := received + rapid.Int64Range(0, 1e12).Draw(t, "passed")
		micros := func(ns int64) int64 { return time.Unix(0, ns).UnixMicro() }
		var r Remote
		r.Heard(micros(read+ahead), time.Duration(sent), time.Duration(received))
		server := micros(now + ahead)
		if e := r.Earliest(time.Duration(now)); !r.Known() || e > server || server-e > (received-sent)/1000+2 {
			t.Fatalf("earliest %d, server %d", e, server)
		}
		if l := r.Latest(time.Duration(now)); l < server-1 || l-server > (received-sent)/1000+2 {
			t.Fatalf("latest %d, server %d", l, server)
		}
		if m, at := r.Last(); m != micros(read+ahead) || at != time.Duration(received) {
			t.Fatalf("last %d at %v", m, at)
		}
	})
}

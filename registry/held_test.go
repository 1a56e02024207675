package registry

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry/internal/rows"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// table is a source whose rows change.
type table struct{ rows []Limit }

func (s *table) Load(context.Context) (Table, error) { return Table{Limits: s.rows}, nil }

func local(t *testing.T, source Source, opts ...Option) *Registry {
	t.Helper()
	opts = append([]Option{WithLocalWindows(), WithLocalSemaphores(), WithInterval(time.Hour), WithAllowEmpty()}, opts...)
	r, err := New(source, tokenbucket.NewMemoryStore(), opts...)
	require.NoError(t, err)
	t.Cleanup(r.Close)
	return r
}

// fading is a context that ends after a number of calls of Err.
type fading struct {
	context.Context
	end   context.CancelFunc
	after int
}

func (f *fading) Err() error {
	err := f.Context.Err()
	if f.after--; f.after <= 0 {
		f.end()
	}
	return err
}

// Whenever its context ends, a call that was not let in holds no place.
func TestEnterLeavesNothing(t *testing.T) {
	row := Limit{Name: "/a", Row: "1", Rate: 1e6, Concurrent: 5}
	r := local(t, Static{row})
	for after := range 12 {
		for range 30 { // where several things are ready, a select takes any
			ctx, cancel := context.WithCancel(context.Background())
			a, err := r.Enter(&fading{ctx, cancel, after}, "/a")
			if err == nil {
				a.Leave()
			}
			cancel()
			require.Zero(t, r.limits.Load().rows["/a"].slot.Inside(), "after it was asked %d times: %v", after, err)
		}
	}
}

// A bucket of another kind is reset, also of a row with a window.
func TestEnterReplacesTheBucket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		row := Limit{Name: "/a", Row: "1", Rate: 100, Window: time.Second, WindowLimit: 100}
		source := &table{[]Limit{row}}
		r := local(t, source)
		ctx := context.Background()
		a, err := r.Enter(ctx, "/a")
		require.NoError(t, err)
		require.True(t, a.OK)
		row.Warmup = time.Second
		source.rows = []Limit{row}
		require.NoError(t, r.Reload(ctx))
		time.Sleep(time.Minute)
		a, err = r.Enter(ctx, "/a")
		require.NoError(t, err)
		require.True(t, a.OK)
		r.Close()
	})
}

// In shadow, too, a call that the concurrency would refuse does not count in the window.
func TestShadowGivesBack(t *testing.T) {
	places, err := semaphore.NewMemory(1)
	require.NoError(t, err)
	elsewhere, err := places.TryAcquire(context.Background(), 1, 0) // the place of another process
	require.NoError(t, err)
	r := local(t, Static{{Name: "/a", Row: "1", NoRate: true, Window: time.Minute, WindowLimit: 10, Concurrent: 1, Shadow: true}},
		WithSemaphores(func(string, int, ...semaphore.Option) (*semaphore.Semaphore, error) { return places, nil }))
	ctx := context.Background()
	used := func() int {
		a, err := r.Enter(ctx, "/a")
		require.NoError(t, err)
		require.True(t, a.OK)
		a.Leave()
		u, _, err := r.Usage(ctx, "/a")
		require.NoError(t, err)
		return u.WindowUsed
	}
	for range 3 {
		require.Zero(t, used())
	}
	require.NoError(t, elsewhere.Release(ctx))
	require.Equal(t, 1, used())
}

// Of rows that come and go, with names that are ever new, no more is kept than of limits that are gone.
func TestSlotsAreForgotten(t *testing.T) {
	source := &table{}
	r := local(t, source)
	const each = mostSlots / 2
	stays := Limit{Name: "stays", Row: "s", NoRate: true, Concurrent: 2}
	held := Limit{Name: "held", Row: "h", NoRate: true, Concurrent: 2}
	source.rows = []Limit{stays, held}
	ctx := context.Background()
	require.NoError(t, r.Reload(ctx))
	a, err := r.Enter(ctx, "held")
	require.NoError(t, err)
	b, err := r.Enter(ctx, "stays")
	require.NoError(t, err)
	b.Leave()
	slot := r.slots["stays"]
	for load := range 6 {
		source.rows = []Limit{stays}
		for i := range each {
			source.rows = append(source.rows, Limit{Name: fmt.Sprint(load, "-", i), Row: fmt.Sprint(i), NoRate: true, Concurrent: 1})
		}
		require.NoError(t, r.Reload(ctx))
		require.LessOrEqual(t, len(r.slots), each+mostSlots+2)
	}
	require.Same(t, slot, r.slots["stays"])
	require.NotNil(t, r.slots["held"], "a call is under way")
	a.Leave()
}

// A row that returns with an older version, after its version was dropped, is in force as it is now, not as it was.
func TestForgottenRowComesBack(t *testing.T) {
	old := Limit{Name: "/a", Row: "1", NoRate: true, Concurrent: 1, Version: 100}
	source := &table{[]Limit{old}}
	r := local(t, source)
	ctx := context.Background()
	a, err := r.Enter(ctx, "/a")
	require.NoError(t, err)
	defer a.Leave()
	source.rows = nil
	require.NoError(t, r.Reload(ctx))
	r.machine.Machine = rows.New[content](rows.AtOnce)
	old.Concurrent, old.Version = 2, 50
	source.rows = []Limit{old}
	require.NoError(t, r.Reload(ctx))
	b, err := r.Enter(ctx, "/a")
	require.NoError(t, err)
	require.True(t, b.OK, "two are allowed")
	b.Leave()
}

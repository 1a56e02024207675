package registry_test

import (
	"bytes"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// soon fails a test whose call does not return within a minute.
func soon(t *testing.T, what string, call func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		call()
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		panic(what + " hangs") // the goroutines of a synctest that fails must not be waited for
	}
}

// A hook may reload: its load is passed to the hook after the present one, and Reload returns when the hook has seen all.
func TestHookReloads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &fake{}
		source.set(row("/a", 1, 1))
		var r atomic.Pointer[registry.Registry]
		var added []int
		var inside atomic.Int32
		hook := func(l registry.Load) {
			require.EqualValues(t, 1, inside.Add(1), "one call at a time")
			defer inside.Add(-1)
			added = append(added, l.Added)
			if r := r.Load(); r != nil && l.Added == 1 {
				source.set(row("/a", 1, 1), row("/b", 1, 1), row("/c", 1, 1), row("/d", 1, 1))
				require.NoError(t, r.Reload(ctx))
				require.Equal(t, 4, r.Stats().Limits, "loaded before Reload returns")
			}
		}
		r.Store(open(t, source, tokenbucket.NewMemoryStore(), registry.WithHook(hook)))
		source.set(row("/a", 1, 1), row("/b", 1, 1))
		soon(t, "Reload of a hook", func() { require.NoError(t, r.Load().Reload(ctx)) })
		require.Equal(t, []int{1, 1, 2}, added)
	})
}

// A hook may close its registry, also in the registry's own loads. No call of the hook begins after that.
func TestHookCloses(t *testing.T) {
	for name, reload := range map[string]bool{"of a Reload": true, "of a load of its own": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				source := &fake{}
				source.set(row("/a", 1, 1))
				var r atomic.Pointer[registry.Registry]
				var calls atomic.Int32
				closed := make(chan struct{})
				r.Store(open(t, source, tokenbucket.NewMemoryStore(), registry.WithHook(func(registry.Load) {
					if r := r.Load(); r != nil && calls.Add(1) == 1 {
						r.Close()
						close(closed)
					}
				})))
				if reload {
					soon(t, "Reload", func() { require.NoError(t, r.Load().Reload(ctx)) })
				}
				soon(t, "Close of a hook", func() { <-closed })
				require.NoError(t, r.Load().Reload(ctx))
				require.EqualValues(t, 1, calls.Load())
			})
		})
	}
}

// A hook that panics is logged, and loads go on.
func TestHookPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &fake{}
		source.set(row("/a", 1, 1))
		var log bytes.Buffer
		calls := 0
		r := open(t, source, tokenbucket.NewMemoryStore(), registry.WithLogger(slog.New(slog.NewTextHandler(&log, nil))),
			registry.WithHook(func(registry.Load) { calls++; panic("a mistake") }))
		require.NoError(t, r.Reload(ctx))
		require.Equal(t, 2, calls)
		require.Contains(t, log.String(), "a mistake")
	})
}

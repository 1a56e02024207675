package weakmap

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

type value struct {
	key string
	_   [64]byte
}

func TestShared(t *testing.T) {
	var m Map[string, value]
	var made atomic.Int64
	get := func(key string) *value {
		return m.Get(key, func() *value { made.Add(1); return &value{key: key} })
	}
	a := get("a")
	require.Same(t, a, get("a"))
	b := get("b")
	require.NotSame(t, a, b)
	require.EqualValues(t, 2, made.Load())
	var all []*value
	m.All(func(v *value) bool { all = append(all, v); return true })
	require.ElementsMatch(t, []*value{a, b}, all)
	n := 0
	m.All(func(*value) bool { n++; return false })
	require.Equal(t, 1, n)
}

// Concurrent calls get the same value.
func TestSharedAtOnce(t *testing.T) {
	var m Map[int, value]
	for key := range 100 {
		var wg sync.WaitGroup
		var got [8]*value
		for i := range got {
			wg.Go(func() { got[i] = m.Get(key, func() *value { runtime.Gosched(); return new(value) }) })
		}
		wg.Wait()
		for _, v := range got {
			require.Same(t, got[0], v)
		}
	}
}

// A value that is unreachable is removed, and the next call makes another.
func TestForgotten(t *testing.T) {
	var m Map[string, value]
	kept := m.Get("kept", func() *value { return new(value) })
	m.Get("dropped", func() *value { return new(value) })
	count := func() (n int) {
		m.values.Range(func(any, any) bool { n++; return true })
		return n
	}
	require.Equal(t, 2, count())
	require.Eventually(t, func() bool { runtime.GC(); return count() == 1 }, 30*time.Second, time.Millisecond)
	require.Same(t, kept, m.Get("kept", func() *value { return new(value) }))
	m.All(func(v *value) bool {
		require.Same(t, kept, v)
		return true
	})
	fresh := m.Get("dropped", func() *value { return &value{key: "fresh"} })
	require.Equal(t, "fresh", fresh.key)
	runtime.KeepAlive(kept)
}

package registry_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

// BenchmarkEnter calls Enter and Leave in a table of 10,000 rows on a MemoryStore. The rates are so high that no call waits.
func BenchmarkEnter(b *testing.B) {
	const rows = 10_000
	limits := make(registry.Static, 0, rows+3)
	for i := range rows {
		limits = append(limits, row(fmt.Sprint("/ibe/", i), 1e9, 1))
	}
	limits = append(limits,
		registry.Limit{Name: "/all", Row: "all", Rate: 1e9, MaxWait: 500 * time.Millisecond, Window: time.Second, WindowLimit: 1 << 30, Concurrent: 1 << 20},
		registry.Limit{Name: "/key/*", Row: "key", Rate: 1e9, MaxWait: 500 * time.Millisecond, PerKey: true},
		registry.Limit{Name: "/off", Row: "off", Disabled: true})
	sw := killswitch.NewLocal(true)
	r := open(b, limits, tokenbucket.NewMemoryStore(), registry.WithSwitch(sw), registry.WithLocalWindows(), registry.WithLocalSemaphores())
	enter := func(b *testing.B, name string) {
		a, err := r.Enter(ctx, name)
		if err != nil || !a.OK {
			b.Error(name, a, err)
			return
		}
		a.Leave()
	}
	for _, of := range []struct {
		text string
		name func(i int) string
	}{
		{"one row", func(int) string { return "/ibe/7" }},
		{"many rows", func(i int) string { return limits[i%rows].Name }},
		{"key of a row", func(int) string { return "/key/a" }},
		{"rate, window and concurrency", func(int) string { return "/all" }},
		{"disabled", func(int) string { return "/off" }},
		{"switch off", func(int) string { return "/ibe/7" }},
	} {
		sw.Set(of.text != "switch off")
		for i := range rows {
			enter(b, of.name(i)) // makes the limiter
		}
		for _, goroutines := range []int{1, 64} {
			b.Run(fmt.Sprintf("%s/%d", of.text, goroutines), func(b *testing.B) {
				b.ReportAllocs()
				inParallel(b, goroutines, func(i int) { enter(b, of.name(i)) })
			})
		}
	}
	limiters := r.Limiters()
	require.Len(b, limiters, rows+1, "each row has a limiter of its own")
}

// inParallel calls f b.N times from that many goroutines. i rises within a goroutine.
func inParallel(b *testing.B, goroutines int, f func(i int)) {
	if goroutines == 1 {
		for i := 0; b.Loop(); i++ {
			f(i)
		}
		return
	}
	share := b.N/goroutines + 1
	done := make(chan struct{})
	b.ResetTimer()
	for range goroutines {
		go func() {
			defer func() { done <- struct{}{} }()
			for i := range share {
				f(i)
			}
		}()
	}
	for range goroutines {
		<-done
	}
}

func BenchmarkReload(b *testing.B) {
	var limits registry.Static
	for i := range 10_000 {
		limits = append(limits, row(fmt.Sprint("/ibe/", i), 10, 1))
	}
	r := open(b, limits, tokenbucket.NewMemoryStore())
	for b.Loop() {
		_ = r.Reload(ctx)
	}
}

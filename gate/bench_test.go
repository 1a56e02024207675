package gate_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// BenchmarkOne calls Enter and Leave of a gate with one limiter on a MemoryStore. The rate is so high that no call waits.
func BenchmarkOne(b *testing.B) {
	ctx := context.Background()
	limiter, err := tokenbucket.NewSmoothBursty("upstream", 1e9)
	if err != nil {
		b.Fatal(err)
	}
	g := gate.One(limiter, 500*time.Millisecond)
	enter := func() {
		a, err := g.Enter(ctx, "")
		if err != nil || !a.OK {
			b.Error(a, err)
			return
		}
		a.Leave()
	}
	for _, goroutines := range []int{1, 64} {
		b.Run(fmt.Sprint(goroutines), func(b *testing.B) {
			b.ReportAllocs()
			if goroutines == 1 {
				for b.Loop() {
					enter()
				}
				return
			}
			done := make(chan struct{})
			share := b.N/goroutines + 1
			b.ResetTimer()
			for range goroutines {
				go func() {
					defer func() { done <- struct{}{} }()
					for range share {
						enter()
					}
				}()
			}
			for range goroutines {
				<-done
			}
		})
	}
}

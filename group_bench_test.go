package tokenbucket_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
)

// BenchmarkGroup grants one permit a call from a group of three members, and from one of its buckets, by 1, 64 and 512 goroutines. Compare the two within
// one run only.
func BenchmarkGroup(b *testing.B) {
	for _, s := range stores {
		for _, goroutines := range []int{1, 64, 512} {
			for _, members := range []int{1, 3} {
				b.Run(fmt.Sprintf("%s/goroutines=%d/members=%d", s.name, goroutines, members), func(b *testing.B) {
					store := s.open(b)(false)
					var all []tb.Member
					for i := range members {
						l, err := tb.NewSmoothBursty(fmt.Sprint("member", i), 1e9, tb.WithStore(store), tb.WithInitialPermits(1e9))
						require.NoError(b, err)
						all = append(all, l)
					}
					try := all[0].(*tb.RateLimiter).TryAcquire
					if members > 1 {
						g, err := tb.All(all...)
						require.NoError(b, err)
						try = g.TryAcquire
					}
					run(b, goroutines, func(int64) bool {
						ok, err := try(ctx, 1, time.Second)
						return ok && err == nil
					})
				})
			}
		}
	}
}

// BenchmarkGroupRefused is TryAcquire of a group, one of whose members owes an hour.
func BenchmarkGroupRefused(b *testing.B) {
	for _, s := range stores {
		b.Run(s.name, func(b *testing.B) {
			store := tb.WithStore(s.open(b)(false))
			var all []tb.Member
			for i := range 3 {
				l, err := tb.NewSmoothBursty(fmt.Sprint(i), 1, store)
				require.NoError(b, err)
				all = append(all, l)
			}
			_, err := all[2].(*tb.RateLimiter).Reserve(ctx, 3600)
			require.NoError(b, err)
			g, err := tb.All(all...)
			require.NoError(b, err)
			run(b, 64, func(int64) bool {
				ok, err := g.TryAcquire(ctx, 1, time.Millisecond)
				return !ok && err == nil
			})
		})
	}
}

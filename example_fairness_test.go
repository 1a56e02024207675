package tokenbucket_test

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

type customer struct{}

// Callers of a customer that asks much do not delay those of others: each customer has its turn.
func ExampleWithFairness() {
	limiter, err := tokenbucket.NewSmoothBursty("search", 10, tokenbucket.WithMaxPermits(0),
		tokenbucket.WithFairness(func(ctx context.Context) string { return ctx.Value(customer{}).(string) }),
		tokenbucket.WithTenantWeights(func(tenant string) int { return map[string]int{"gold": 2}[tenant] })) // others: 1
	if err != nil {
		panic(err)
	}
	var callers sync.WaitGroup
	for _, name := range []string{"busy", "busy", "busy", "busy", "gold", "gold", "gold", "quiet"} {
		callers.Go(func() {
			ctx := context.WithValue(context.Background(), customer{}, name)
			if _, err := limiter.Acquire(ctx, 1); err == nil {
				fmt.Print(name, " ")
			}
		})
		time.Sleep(time.Millisecond) // the order of arrival
	}
	callers.Wait()
	// Output: busy gold gold quiet busy gold busy busy
}

package tokenbucket_test

import (
	"context"
	"fmt"
	"runtime"
	"time"

	"github.com/jonboulle/clockwork"

	"github.com/go-tokenbucket/tokenbucket"
)

type customer struct{}

// Callers of a customer that asks much do not delay those of others: each customer has its turn.
func ExampleWithFairness() {
	clock := clockwork.NewFakeClock()
	limiter, err := tokenbucket.NewSmoothBursty("search", 10, tokenbucket.WithMaxPermits(0), tokenbucket.WithClock(clock),
		tokenbucket.WithFairness(func(ctx context.Context) string { return ctx.Value(customer{}).(string) }),
		tokenbucket.WithTenantWeights(func(tenant string) int { return map[string]int{"gold": 2}[tenant] })) // others: 1
	if err != nil {
		panic(err)
	}
	served := make(chan string)
	callers := []string{"busy", "busy", "busy", "busy", "gold", "gold", "gold", "quiet"}
	for already, name := range callers {
		go func() {
			ctx := context.WithValue(context.Background(), customer{}, name)
			if _, err := limiter.Acquire(ctx, 1); err == nil {
				served <- name
			}
		}()
		for waiting := 0; waiting <= already; waiting, _ = limiter.Waiting() { // the order of arrival
			runtime.Gosched()
		}
	}
	for range callers {
		clock.Advance(100 * time.Millisecond) // until the next permit is due
		fmt.Print(<-served, " ")
	}
	// Output: busy gold gold quiet busy gold busy busy
}

func ExampleWithTenantWeights() {
	limiter, err := tokenbucket.NewSmoothBursty("search", 10, tokenbucket.WithMaxPermits(0),
		tokenbucket.WithFairness(func(ctx context.Context) string { return ctx.Value(customer{}).(string) }),
		tokenbucket.WithTenantWeights(func(tenant string) int { return map[string]int{"gold": 2}[tenant] })) // others: 1
	if err != nil {
		panic(err)
	}
	_, err = limiter.Acquire(context.WithValue(context.Background(), customer{}, "gold"), 1)
	fmt.Println(err)
	// Output: <nil>
}

package tokenbuckettest_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/tokenbuckettest"
)

// A program that serves stale fares while its limiter has no answer.
func fares(ctx context.Context, limiter *tokenbucket.RateLimiter) string {
	ok, err := limiter.TryAcquire(ctx, 1, 0)
	switch {
	case errors.Is(err, tokenbucket.ErrStoreUnavailable):
		return "stale fares"
	case err != nil:
		return err.Error()
	case !ok:
		return "try again later"
	}
	return "fares"
}

// What a program does while its store is away.
func Example() {
	store := tokenbuckettest.NewStore()
	limiter, err := tokenbucket.NewSmoothBursty("fares", 0.001, tokenbucket.WithStore(store), tokenbucket.WithMaxPermits(2),
		tokenbucket.WithInitialPermits(2))
	if err != nil {
		panic(err) // the configuration is wrong; the message names the field
	}
	ctx := context.Background()
	fmt.Println(fares(ctx, limiter))
	store.FailNext(1, tokenbuckettest.Outage())
	fmt.Println(fares(ctx, limiter))
	fmt.Println(fares(ctx, limiter))
	fmt.Println(fares(ctx, limiter))
	// Output:
	// fares
	// stale fares
	// fares
	// try again later
}

// With FailOpen calls pass during an outage.
func ExampleStore_Fail() {
	store := tokenbuckettest.NewStore()
	limiter, err := tokenbucket.NewSmoothBursty("fares", 0.001, tokenbucket.WithStore(store), tokenbucket.WithFailurePolicy(tokenbucket.FailOpen))
	if err != nil {
		panic(err)
	}
	store.Fail(tokenbuckettest.Outage())
	for range 3 {
		fmt.Println(limiter.TryAcquire(context.Background(), 1, 0))
	}
	// Output:
	// true <nil>
	// true <nil>
	// true <nil>
}

// A reply that is lost costs the permits that were taken.
func ExampleLoseReply() {
	store := tokenbuckettest.NewStore()
	limiter, err := tokenbucket.NewSmoothBursty("fares", 0.001, tokenbucket.WithStore(store), tokenbucket.WithMaxPermits(10),
		tokenbucket.WithInitialPermits(10))
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	store.FailNext(1, tokenbuckettest.LoseReply())
	_, err = limiter.TryAcquire(ctx, 4, 0)
	fmt.Println(err)
	bucket, err := limiter.State(ctx)
	fmt.Printf("%.0f %v\n", bucket.StoredPermits, err)
	// Output:
	// tokenbucket: store unavailable: tokenbuckettest: the reply was lost
	// 6 <nil>
}

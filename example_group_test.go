package tokenbucket_test

import (
	"context"
	"fmt"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// A call counts against the limits of its upstream, per second and per day, and against that of its tenant.
func ExampleAll() {
	ctx, store := context.Background(), tokenbucket.NewMemoryStore()
	perSecond, _ := tokenbucket.NewSmoothBursty("fares/second", 5, tokenbucket.WithStore(store), tokenbucket.WithInitialPermits(5))
	perDay, _ := tokenbucket.NewSmoothBursty("fares/day", 10_000.0/86_400, tokenbucket.WithStore(store), tokenbucket.WithMaxPermits(100),
		tokenbucket.WithInitialPermits(100))
	tenant, _ := tokenbucket.NewSmoothBursty("tenant/42", 1, tokenbucket.WithStore(store), tokenbucket.WithMaxPermits(2), tokenbucket.WithInitialPermits(2))
	limits, err := tokenbucket.All(perSecond, perDay, tenant)
	if err != nil {
		panic(err)
	}
	for range 3 {
		r, err := limits.TryReserve(ctx, 1, 0)
		switch {
		case err != nil:
			fmt.Println(err)
		case r.OK():
			fmt.Println("passed")
		default:
			fmt.Println("refused by", r.RefusedBy().Name(), "for", r.RetryAfter().Round(time.Second))
		}
	}
	// Output:
	// passed
	// passed
	// refused by tenant/42 for 1s
}

// One name with several limits.
func ExampleNewLimits() {
	store := tokenbucket.NewMemoryStore()
	limits, err := tokenbucket.NewLimits("fares", tokenbucket.PerSecond(5), tokenbucket.PerDay(10_000).Burst(2000),
		tokenbucket.WithStore(store), tokenbucket.WithInitialPermitsUpTo(2000))
	if err != nil {
		panic(err)
	}
	ok, err := limits.TryAcquire(context.Background(), 1, 0)
	fmt.Println(ok, err)
	for _, l := range limits.Members() {
		fmt.Println(l.Name())
	}
	// Output:
	// true <nil>
	// fares/second
	// fares/day
}

// A tenant has 100,000 tokens of a language model a minute, and all tenants together 500,000. How many tokens a call takes is known afterwards. So it
// reserves an estimate, and settles it in both.
func ExampleGroupReservation_Settle() {
	ctx, store := context.Background(), tokenbucket.NewMemoryStore()
	full := func(n float64) []tokenbucket.Option {
		return []tokenbucket.Option{tokenbucket.WithStore(store), tokenbucket.WithMaxPermits(n), tokenbucket.WithInitialPermits(n)}
	}
	tenant, _ := tokenbucket.NewSmoothBursty("tokens/tenant/42", 100_000.0/60, full(20_000)...)
	all, _ := tokenbucket.NewSmoothBursty("tokens", 500_000.0/60, full(100_000)...)
	tokens, err := tokenbucket.All(tenant, all)
	if err != nil {
		panic(err)
	}
	r, err := tokens.Reserve(ctx, 5000) // the estimate
	if err != nil {
		panic(err)
	}
	<-r.Ready()
	fmt.Println(r.Settle(ctx, 1200)) // by the answer of the model
	state, _ := tenant.State(ctx)
	fmt.Println(state.StoredPermits >= 20_000-1200)
	// Output:
	// <nil>
	// true
}

// Three keys of one upstream. Each call is charged to the key that is due first.
func ExampleAny() {
	ctx, store := context.Background(), tokenbucket.NewMemoryStore()
	var members []tokenbucket.Member
	for _, key := range []string{"key-a", "key-b", "key-c"} {
		l, err := tokenbucket.NewSmoothBursty(key, 1, tokenbucket.WithStore(store))
		if err != nil {
			panic(err)
		}
		members = append(members, l)
	}
	keys, err := tokenbucket.Any(members...)
	if err != nil {
		panic(err)
	}
	for range 4 {
		key, err := keys.TryAcquire(ctx, 1, 0)
		switch {
		case err != nil:
			fmt.Println(err)
		case key == nil:
			fmt.Println("all are used up")
		default:
			fmt.Println("call with", key.Name())
		}
	}
	// Output:
	// call with key-a
	// call with key-b
	// call with key-c
	// all are used up
}

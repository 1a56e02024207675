package gate_test

import (
	"context"
	"fmt"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// Calls of a language model cost tokens, whose number is known only afterwards. A call begins with an estimate, and is settled with what it
// has used.
func ExampleAskN() {
	tokens, err := tokenbucket.NewSmoothBursty("tokens", 10_000/60.0, tokenbucket.WithMaxPermits(10_000), tokenbucket.WithInitialPermits(10_000))
	if err != nil {
		panic(err)
	}
	ctx, model := context.Background(), gate.One(tokens, 0)
	ask := func(estimate, used int) {
		a, err := gate.AskN(ctx, model, "", estimate)
		switch {
		case err != nil:
			fmt.Println(err)
			return
		case !a.OK:
			fmt.Println("refused: try again in", a.RetryAfter.Round(time.Second))
			return
		}
		defer a.Leave()
		if err := a.Settle(ctx, used); err != nil { // after the model has answered
			fmt.Println(err)
		}
		fmt.Println(used, "tokens")
	}
	ask(4000, 1000)
	ask(8000, 9000) // 9,000 are left
	ask(2000, 2000)
	ask(50_000, 0)
	// Output:
	// 1000 tokens
	// 9000 tokens
	// refused: try again in 12s
	// gate: key "": cost 50000: tokenbucket: can never be granted: bucket "tokens": permits 50000: want a timeout of at least 4m0s
}

// A call must pass a limit per second and one per day. A refusal names the limit that refused.
func ExampleOne_several() {
	second, err := tokenbucket.NewSmoothBursty("fares per second", 5, tokenbucket.WithInitialPermits(5))
	if err != nil {
		panic(err)
	}
	day, err := tokenbucket.NewSmoothBursty("fares per day", 2.0/86_400, tokenbucket.WithMaxPermits(2), tokenbucket.WithInitialPermits(2))
	if err != nil {
		panic(err)
	}
	both, err := tokenbucket.All(second, day)
	if err != nil {
		panic(err)
	}
	fares := gate.One(both, 500*time.Millisecond)
	for range 3 {
		a, err := gate.Ask(context.Background(), fares, "")
		if err != nil {
			panic(err)
		}
		fmt.Println(a.OK, a.Member)
		a.Leave()
	}
	// Output:
	// true fares per day
	// true fares per day
	// false fares per day
}

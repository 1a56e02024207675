package killswitch_test

import (
	"context"
	"fmt"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

// A limiter that is used without a registry takes the switch as a function.
func Example() {
	sw := killswitch.NewLocal(true)
	limiter, err := tokenbucket.NewSmoothBursty("upstream", 1, tokenbucket.WithSwitch(sw.Enabled))
	if err != nil {
		panic(err)
	}
	for _, on := range []bool{true, true, false} {
		sw.Set(on)
		ok, err := limiter.TryAcquire(context.Background(), 1, 0)
		fmt.Println(on, ok, err)
	}
	// Output:
	// true true <nil>
	// true false <nil>
	// false true <nil>
}

package gate_test

import (
	"context"
	"fmt"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// consumer is an adapter: it handles the messages of a queue as fast as a gate lets it.
type consumer struct{ gate gate.Gate }

// handle calls f for a message, unless the gate refuses.
func (c consumer) handle(ctx context.Context, topic string, f func()) error {
	a, err := gate.Ask(ctx, c.gate, topic)
	if err != nil {
		return err // no decision was possible
	}
	if !a.OK {
		return fmt.Errorf("refused: try again in %v", a.RetryAfter.Round(time.Second))
	}
	defer a.Leave() // the call has ended
	f()
	return nil
}

// An adapter of one's own, with one limiter for all of its calls. A registry.Registry is a gate, too, with a limit for each key.
func Example() {
	limiter, err := tokenbucket.NewSmoothBursty("mails", 1.0/60)
	if err != nil {
		panic(err) // the configuration is wrong; the message names the field
	}
	mails := consumer{gate.One(limiter, 0)}
	for range 2 {
		fmt.Println(mails.handle(context.Background(), "welcome", func() { fmt.Println("mail sent") }))
	}
	// Output:
	// mail sent
	// <nil>
	// refused: try again in 1m0s
}

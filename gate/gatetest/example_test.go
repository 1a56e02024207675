package gatetest_test

import (
	"context"
	"errors"
	"testing"

	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/gate/gatetest"
)

// handle is an adapter under test: it calls f if the gate admits it.
func handle(ctx context.Context, g gate.Gate, f func()) error {
	a, err := gate.Ask(ctx, g, "mails")
	if err != nil {
		return err
	}
	if !a.OK {
		return errors.New("refused")
	}
	defer a.Leave()
	f()
	return nil
}

// testHandle is the test of the adapter.
var testHandle = func(t *testing.T) {
	gatetest.TestNotLetThrough(t, func(ctx context.Context, t *testing.T, g gate.Gate) error {
		return handle(ctx, g, func() { t.Error("called") })
	})
}

func TestHandle(t *testing.T) { testHandle(t) }

// The test of an adapter. It needs a *testing.T, so this example only shows it.
func Example() {
	_ = testHandle
}

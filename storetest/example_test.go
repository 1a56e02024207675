package storetest_test

import (
	"testing"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/storetest"
)

// testStore is TestStore of a package with a store of its own. Here it is the memory store, which no other process can open.
var testStore = func(t *testing.T) {
	storetest.Run(t, func(*testing.T) func() tokenbucket.Store {
		place := tokenbucket.NewMemoryStore() // of your own store: an empty database, for example
		return func() tokenbucket.Store { return place }
	})
}

// The test of a store. It needs a *testing.T, so this example only shows it.
func Example() {
	_ = testStore
}

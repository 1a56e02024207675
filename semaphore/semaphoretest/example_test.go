package semaphoretest_test

import (
	"context"
	"testing"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/semaphoretest"
)

// testSemaphore is TestSemaphore of a package with a semaphore of its own. Here it is one of this process, so that every process has the same.
var testSemaphore = func(t *testing.T) {
	semaphoretest.Semaphore(t, func(t *testing.T, permits int, opts ...semaphore.Option) func() *semaphore.Semaphore {
		s, err := semaphore.NewMemory(permits, opts...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = s.Close(context.Background()) })
		return func() *semaphore.Semaphore { return s }
	})
}

// The test of a semaphore. It needs a *testing.T, so this example only shows it.
func Example() {
	_ = testSemaphore
}

package tokenbucket_test

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/tokenbuckettest"
)

// The code of docs/testing.md.

func TestTestingTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limiter, err := tokenbucket.NewSmoothBursty("fares", 5)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		for range 6 {
			if _, err := limiter.Acquire(t.Context(), 1); err != nil {
				t.Fatal(err)
			}
		}
		if waited := time.Since(began); waited != time.Second {
			t.Errorf("six calls took %v: want one at once, and five at 5/s", waited)
		}
	})
}

func TestTestingFaults(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := tokenbuckettest.NewStore()
		limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithStore(store))
		if err != nil {
			t.Fatal(err)
		}
		store.Fail(tokenbuckettest.Hang())
		began := time.Now()
		_, err = limiter.Try(t.Context())
		if !errors.Is(err, tokenbucket.ErrStoreUnavailable) || time.Since(began) != time.Second {
			t.Errorf("%v after %v: want an error after the store timeout", err, time.Since(began))
		}
		store.Restore()
		time.Sleep(time.Second) // a probe ends the outage
		if ok, err := limiter.Try(t.Context()); !ok {
			t.Error("not granted after the outage:", err)
		}
		time.Sleep(time.Minute) // the bubble waits for the probes
	})
}

package semaphore_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// At most two calls run at once in this process.
func ExampleNewMemory() {
	ctx := context.Background()
	connections, err := semaphore.NewMemory(2)
	if err != nil {
		panic(err)
	}
	first, _ := connections.Acquire(ctx, 1)
	second, _ := connections.Acquire(ctx, 1)
	_, err = connections.TryAcquire(ctx, 1, 10*time.Millisecond)
	fmt.Println("a third one:", err)
	_ = first.Release(ctx)
	third, err := connections.TryAcquire(ctx, 1, 10*time.Millisecond)
	fmt.Println("after a release:", err)
	fmt.Println("fences rise:", first.Fence() < second.Fence() && second.Fence() < third.Fence())
	// Output:
	// a third one: semaphore: no permits in time
	// after a release: <nil>
	// fences rise: true
}

// A bound on the calls that run at once in all instances. The context of a call ends when its permit is lost.
func ExampleNewRedis() {
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	bookings, err := semaphore.NewRedis(client, "/ibe/Booking", 20, semaphore.WithLease(10*time.Second))
	if err != nil {
		panic(err)
	}
	defer bookings.Close(context.Background())
	err = bookings.Do(context.Background(), func(ctx context.Context) error {
		return book(ctx)
	})
	if errors.Is(err, semaphore.ErrExpired) {
		fmt.Println("Redis was away for longer than the lease: somebody else may have gone on meanwhile")
	}
}

// A rate and a semaphore together bound the calls per second and the calls at once.
func Example_both() {
	ctx := context.Background()
	rate, _ := tokenbucket.NewSmoothBursty("search", 100)
	running, _ := semaphore.NewMemory(8)
	search := func() error {
		if ok, err := rate.Try(ctx); !ok || err != nil {
			return errors.Join(errors.New("too many"), err)
		}
		return running.Do(ctx, book) // the rate first: a call that waits for it holds no permit
	}
	fmt.Println(search())
	// Output: <nil>
}

func book(context.Context) error { return nil }

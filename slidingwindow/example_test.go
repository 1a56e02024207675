package slidingwindow_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"strconv"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// At most three calls in any minute, in this process.
func ExampleNew() {
	limiter, err := slidingwindow.New("/fares", 3, time.Minute, time.Second)
	if err != nil {
		panic(err) // the message names the field
	}
	for range 4 {
		ok, err := limiter.Allow(context.Background())
		fmt.Println(ok, err)
	}
	left, _ := limiter.Remaining(context.Background())
	fmt.Println(left, "left; another one in about", limiter.RetryAfter(1).Round(time.Minute))
	// Output:
	// true <nil>
	// true <nil>
	// true <nil>
	// false <nil>
	// 0 left; another one in about 1m0s
}

// At most a hundred calls in any minute, of all instances together. During an outage of Redis each of four instances has a quarter.
func ExampleWithRedis() {
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	fares, err := slidingwindow.New("/ibe/AvailFare", 100, time.Minute, time.Second,
		slidingwindow.WithRedis(client),
		slidingwindow.WithFailurePolicy(slidingwindow.LocalShare(25)),
		slidingwindow.WithObserver(slidingwindow.Observer{Health: func(h slidingwindow.Health) {
			log.Printf("redis down: %t, %v", h.Down, h.Err)
		}}))
	if err != nil {
		panic(err)
	}
	http.HandleFunc("/fares", func(w http.ResponseWriter, r *http.Request) {
		switch ok, err := fares.Allow(r.Context()); {
		case err != nil:
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		case !ok:
			w.Header().Set("Retry-After", fmt.Sprint(int(fares.RetryAfter(1)/time.Second)+1))
			http.Error(w, "too many", http.StatusTooManyRequests)
		default:
			fmt.Fprintln(w, "call the upstream here")
		}
	})
}

// A resource with a number as its name.
func ExampleNewKey() {
	customer, err := slidingwindow.NewKey(4711, 10, time.Hour, time.Minute)
	if err != nil {
		panic(err)
	}
	ok, _ := customer.AllowN(context.Background(), 10)
	fmt.Println(customer.Name(), ok)
	// Output: 4711 true
}

// Permits that were not used are refunded. The result has the number of permits left.
func ExampleLimiter_Take() {
	limiter, err := slidingwindow.New("/mails", 100, time.Hour, time.Minute)
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	batch, err := limiter.Take(ctx, 40)
	if err != nil {
		panic(err)
	}
	fmt.Println(batch.Allowed, batch.Remaining, "of", batch.Limit)
	if err := limiter.Refund(ctx, batch, 15); err != nil { // only 25 were sent
		panic(err)
	}
	left, _ := limiter.Remaining(ctx)
	fmt.Println(left)
	// Output:
	// true 60 of 100
	// 75
}

// A worker waits until the window has room.
func ExampleLimiter_Wait() {
	limiter, err := slidingwindow.New("/reports", 2, 100*time.Millisecond, 10*time.Millisecond)
	if err != nil {
		panic(err)
	}
	began := time.Now()
	for range 5 {
		if err := limiter.Wait(context.Background()); err != nil {
			panic(err)
		}
	}
	fmt.Println(time.Since(began) >= 200*time.Millisecond)
	// Output: true
}

// The limit of all instances is lowered, without a restart.
func ExampleLimiter_SetLimit() {
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	fares, err := slidingwindow.New("/ibe/AvailFare", 100, time.Minute, time.Second, slidingwindow.WithRedis(client))
	if err != nil {
		panic(err)
	}
	http.HandleFunc("/limit", func(w http.ResponseWriter, r *http.Request) {
		n, _ := strconv.Atoi(r.FormValue("n"))
		if err := fares.SetLimit(r.Context(), n); err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
		}
	})
}

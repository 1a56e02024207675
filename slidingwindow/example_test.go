package slidingwindow_test

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// Three calls in any minute, in this process.
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

// A hundred calls in any minute, of all instances together. While Redis is away each of four goes on with a quarter.
func ExampleWithRedis() {
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	fares, err := slidingwindow.New("/ibe/AvailFare", 100, time.Minute, time.Second,
		slidingwindow.WithRedis(client),
		slidingwindow.WithShare(25),
		slidingwindow.WithHook(func(err error) { log.Println("redis is back, or why not:", err) }))
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

// A resource that a number names.
func ExampleNewKey() {
	customer, err := slidingwindow.NewKey(4711, 10, time.Hour, time.Minute)
	if err != nil {
		panic(err)
	}
	ok, _ := customer.AllowN(context.Background(), 10)
	fmt.Println(customer.Name(), ok)
	// Output: 4711 true
}

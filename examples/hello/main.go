package main

import (
	"context"
	"fmt"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/redis/go-redis/v9"
)

func main() {
	store := tokenbucket.NewRedisScriptStore(redis.NewClient(&redis.Options{Addr: "localhost:6379"}))
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithStore(store)) // 5 calls a second
	if err != nil {
		panic(err) // the configuration is wrong; the message names the field
	}
	for call := 1; call <= 20; call++ {
		waited, err := limiter.Acquire(context.Background(), 1)
		fmt.Println("call", call, "waited", waited, err)
	}
}

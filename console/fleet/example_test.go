package fleet_test

import (
	"context"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A gateway written in Go publishes its figures for consoles.
func ExampleNewPublisher() {
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	source := registry.Static{{Name: "/ibe/AvailFare", Rate: 5, MaxWait: 500 * time.Millisecond}}

	meter := fleet.NewMeter()
	limits, err := registry.New(source, tokenbucket.NewRedisScriptStore(client),
		registry.WithLimiterOptions(tokenbucket.WithObserver(meter.Observer())), registry.WithBypassHook(meter.Bypassed), registry.WithHook(meter.Loaded))
	if err != nil {
		panic(err)
	}
	defer limits.Close()
	meter.Follow(limits)
	publisher, err := fleet.NewPublisher(client, meter)
	if err != nil {
		panic(err)
	}
	defer func() { _ = publisher.Close(context.Background()) }()
}

// A console reads what all instances have published.
func ExampleReader() {
	reader := fleet.NewReader(redis.NewClient(&redis.Options{Addr: "localhost:6379"}))
	ctx := context.Background()
	before, err := reader.Snapshot(ctx)
	if err != nil {
		panic(err)
	}
	time.Sleep(6 * time.Second)
	now, err := reader.Snapshot(ctx)
	if err != nil {
		panic(err)
	}
	for name, rate := range fleet.Rates(before, now) {
		fmt.Printf("%s: %.1f/s granted, %.1f/s refused, p99 of the waits %v\n", name, rate.Granted, rate.Refused, rate.P99)
	}
	points, err := reader.History(ctx, "/ibe/AvailFare", now.At.Add(-fleet.Day))
	if err != nil {
		panic(err)
	}
	fmt.Println(len(points), "minutes")
}

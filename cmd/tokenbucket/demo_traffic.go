package main

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"time"

	consolefleet "github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

const (
	tide        = 90 * time.Second // period of the traffic
	held        = 8 * time.Second  // length of a penalty of the slow upstream
	heldEvery   = 75 * time.Second // time between two penalties
	mostPending = 200              // maximum number of waiting calls, for each limit and gateway
)

// traffic sends calls to one gateway until ctx ends.
func (s *show) traffic(ctx context.Context, limits *registry.Registry, meter *consolefleet.Meter, gateway int) {
	var running sync.WaitGroup
	ctx, cancel := context.WithCancel(ctx)
	s.onClose(func() { cancel(); running.Wait() })
	offer := func(name string, demand float64, offset int) {
		if demand > 0 {
			running.Go(func() { callers(ctx, limits, name, demand/float64(s.instances), offset) })
		}
	}
	offer(bucketName, 9, 0)
	for i, r := range demoRows {
		offer(r.name, r.demand, i+1)
	}
	running.Go(func() { s.work(ctx, gateway) })
	if gateway == 0 {
		running.Go(func() { s.penalties(ctx, limits, meter) })
	}
}

// callers makes calls at random times, at a rate that rises and falls with tide.
func callers(ctx context.Context, limits *registry.Registry, name string, demand float64, offset int) {
	var calls sync.WaitGroup
	defer calls.Wait()
	pending := make(chan struct{}, mostPending)
	for next := time.Now(); ; {
		phase := 2 * math.Pi * (float64(next.UnixMilli())/float64(tide.Milliseconds()) + float64(offset)/7)
		rate := max(demand*(1+0.8*math.Sin(phase)), demand/10)
		next = next.Add(time.Duration(min(rand.ExpFloat64()/rate, 10) * float64(time.Second)))
		if !sleepUntil(ctx, next) {
			return
		}
		select {
		case pending <- struct{}{}:
			calls.Go(func() {
				defer func() { <-pending }()
				_, _ = limits.Enter(ctx, name) // the meter counts it
			})
		default: // mostPending calls wait already
		}
	}
}

// penalties penalizes the slow upstream from time to time, as its Retry-After would.
func (s *show) penalties(ctx context.Context, limits *registry.Registry, meter *consolefleet.Meter) {
	for next := time.Now().Add(20 * time.Second); sleepUntil(ctx, next); next = next.Add(heldEvery) {
		if limits.Penalize(ctx, "/slow/Upstream", held) == nil {
			meter.Penalized("/slow/Upstream", time.Now().Add(held))
		}
	}
}

// work acquires places of the semaphore, and counts letters in the window.
func (s *show) work(ctx context.Context, gateway int) {
	exports := s.exports.Labelled(fmt.Sprintf("export of gateway-%d", gateway+1))
	var jobs sync.WaitGroup
	defer jobs.Wait()
	for range 2 {
		jobs.Go(func() {
			for sleepUntil(ctx, time.Now().Add(time.Duration(rand.Int64N(int64(4*time.Second))))) {
				_ = exports.Do(ctx, func(ctx context.Context) error {
					sleepUntil(ctx, time.Now().Add(time.Duration(2+rand.IntN(9))*time.Second))
					return nil
				})
			}
		})
	}
	for sleepUntil(ctx, time.Now().Add(time.Second)) {
		_, _ = s.letters.Allow(ctx)
	}
}

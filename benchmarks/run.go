package main

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// load is a closed loop: every caller makes its next call as soon as the last one has returned.
type load struct {
	Callers   int
	Keys      int
	Duration  time.Duration
	Latencies bool // record latencies, at the cost of two clock reads for each call
}

// counts is the result of a load.
type counts struct {
	Granted, Refused, Errors int64
	FirstError               string
	Elapsed                  time.Duration
	Mallocs                  uint64
	Latencies                histogram
}

func (c *counts) calls() int64 { return c.Granted + c.Refused + c.Errors }

// answered returns the number of calls that were granted or refused.
func (c *counts) answered() int64 { return c.Granted + c.Refused }

func (c *counts) add(o *counts) {
	c.Granted += o.Granted
	c.Refused += o.Refused
	c.Errors += o.Errors
	if c.FirstError == "" {
		c.FirstError = o.FirstError
	}
	if o.Latencies.Counts == nil {
		return
	}
	if c.Latencies.Counts == nil {
		c.Latencies = newHistogram()
	}
	c.Latencies.merge(o.Latencies)
}

// drive runs the load against the limiter.
func drive(l limiter, ld load) counts {
	var stop atomic.Bool
	start := make(chan struct{})
	each := make([]counts, ld.Callers)
	var ready, done sync.WaitGroup
	for i := range each {
		ready.Add(1)
		done.Go(func() {
			if ld.Latencies {
				each[i].Latencies = newHistogram()
			}
			ready.Done()
			<-start
			call(l, ld, i, &stop, &each[i])
		})
	}
	ready.Wait()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	timer := time.NewTimer(ld.Duration)
	began := time.Now()
	close(start)
	<-timer.C
	stop.Store(true)
	done.Wait()
	total := counts{Elapsed: time.Since(began)}
	runtime.ReadMemStats(&after)
	total.Mallocs = after.Mallocs - before.Mallocs
	for i := range each {
		total.add(&each[i])
	}
	return total
}

// call runs one caller, which makes at least one call. Callers start at different keys and cycle through all of them.
func call(l limiter, ld load, caller int, stop *atomic.Bool, into *counts) {
	var c counts // a local copy: the callers' counts share cache lines
	c.Latencies = into.Latencies
	key := caller * ld.Keys / ld.Callers
	for first := true; first || !stop.Load(); first = false {
		var began time.Time
		if ld.Latencies {
			began = time.Now()
		}
		granted, err := l.Take(key)
		if ld.Latencies {
			c.Latencies.add(time.Since(began))
		}
		switch {
		case err != nil:
			if c.Errors++; c.FirstError == "" {
				c.FirstError = err.Error()
			}
		case granted:
			c.Granted++
		default:
			c.Refused++
		}
		if key++; key == ld.Keys {
			key = 0
		}
	}
	*into = c
}

// contender is a rival in one workload.
type contender struct {
	rival
	limiter limiter
	account *account // for buckets of this library, otherwise nil
	rounds  []counts
	wrong   []error
}

// answers is the expected result of a workload's calls.
type answers int

const (
	allGranted answers = iota
	allRefused
	either // both grants and refusals, as the limit decides
)

// enter opens a rival and brings its buckets into the state that the workload needs.
func (b *bench) enter(r rival, l limit, ld load, want answers) (*contender, error) {
	b.opened++
	names := bucketNames(fmt.Sprintf("b%02d:", b.opened), ld.Keys)
	lim, err := r.open(b.clients, names, l)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", r.name, err)
	}
	c := &contender{rival: r, limiter: lim}
	if t, ok := lim.(*tokenBuckets); ok {
		if c.account, err = openAccount(t); err != nil {
			return nil, fmt.Errorf("%s: %w", r.name, err)
		}
	}
	if want == allRefused {
		if err := exhaust(lim, l, ld.Keys, c.account); err != nil {
			return nil, fmt.Errorf("%s: %w", r.name, err)
		}
	}
	ld.Duration /= 5 // a warm-up run for connections, caches and pools
	c.settle(drive(lim, ld), want)
	return c, nil
}

// exhaust takes all permits of each bucket.
func exhaust(l limiter, lim limit, keys int, a *account) error {
	for key := range keys {
		for n := int64(0); ; n++ {
			granted, err := l.Take(key)
			if err != nil {
				return err
			}
			if !granted {
				break
			}
			if a != nil {
				a.granted++
			}
			if n > lim.Burst {
				return fmt.Errorf("bucket %d granted %d permits of a burst of %d, and refuses nothing", key, n, lim.Burst)
			}
		}
	}
	return nil
}

// settle checks the result of a load.
func (c *contender) settle(n counts, want answers) {
	switch {
	case want == allGranted && n.Refused > 0:
		c.wrong = append(c.wrong, fmt.Errorf("%s: %d of %d calls refused where all must be granted", c.name, n.Refused, n.calls()))
	case want == allRefused && n.Granted > 0:
		c.wrong = append(c.wrong, fmt.Errorf("%s: %d of %d calls granted where all must be refused", c.name, n.Granted, n.calls()))
	case n.answered() == 0:
		c.wrong = append(c.wrong, fmt.Errorf("%s: no call was answered; first error: %s", c.name, n.FirstError))
	}
	if c.account == nil {
		return
	}
	if n.Errors > 0 {
		c.wrong = append(c.wrong, fmt.Errorf("%s: %d calls failed, the first: %s", c.name, n.Errors, n.FirstError))
	}
	c.account.granted += n.Granted
	if err := c.account.check(); err != nil {
		c.wrong = append(c.wrong, fmt.Errorf("%s: %w", c.name, err))
	}
}

// compete measures rivals in turn. Each round begins with another rival.
func (b *bench) compete(rivals []rival, rounds int, l limit, ld load, want answers) ([]*contender, error) {
	var cs []*contender
	for _, r := range rivals {
		c, err := b.enter(r, l, ld, want)
		if err != nil {
			return nil, err
		}
		cs = append(cs, c)
	}
	settle := func(c *contender, n counts) { c.settle(n, want) }
	if err := b.alternate(cs, rounds, func(*contender) load { return ld }, settle); err != nil {
		return nil, err
	}
	return cs, b.clients.plain.FlushDB(b.ctx).Err()
}

// alternate runs the load of each contender in turn.
func (b *bench) alternate(cs []*contender, rounds int, under func(*contender) load, settle func(*contender, counts)) error {
	for round := range rounds {
		for i := range cs {
			if err := b.ctx.Err(); err != nil {
				return err
			}
			c := cs[(i+round)%len(cs)]
			runtime.GC()
			n := drive(c.limiter, under(c))
			c.rounds = append(c.rounds, n)
			settle(c, n)
		}
		b.progress.step("round %d of %d", round+1, rounds)
	}
	return nil
}

// figure returns the medians over the rounds.
func (c *contender) figure() figure {
	f := figure{rival: c.name}
	var calls, mallocs, p50, p99 []float64
	for i := range c.rounds {
		n := &c.rounds[i]
		calls = append(calls, float64(n.Elapsed)/float64(max(1, n.answered())))
		mallocs = append(mallocs, float64(n.Mallocs)/float64(max(1, n.calls())))
		if n.Latencies.Counts != nil {
			p50 = append(p50, float64(n.Latencies.quantile(0.5)))
			p99 = append(p99, float64(n.Latencies.quantile(0.99)))
		}
		f.errors += n.Errors
	}
	f.nanos, f.allocs = median(calls), median(mallocs)
	f.p50, f.p99 = time.Duration(median(p50)), time.Duration(median(p99))
	f.wrong = errors.Join(c.wrong...)
	return f
}

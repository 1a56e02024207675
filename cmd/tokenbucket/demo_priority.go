package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/jedib0t/go-pretty/v6/text"

	"github.com/go-tokenbucket/tokenbucket"
)

// showPriority offers bookings and searches to gateways that share a bucket: first with one priority for all, then with the lowest for
// searches. It prints what became of them.
func (d *demo) showPriority(ctx context.Context) error {
	b, err := openBackend(ctx, &d.options)
	if err != nil {
		return err
	}
	defer b.close()
	var bookings []*tokenbucket.RateLimiter
	for range d.instances {
		l, err := d.newLimiter(d.options, b.newStore(), tokenbucket.WithMaxPermits(1), tokenbucket.WithInitialPermits(1))
		if err != nil {
			return err
		}
		bookings = append(bookings, l)
	}
	fmt.Fprintf(d.out, "%s one bucket, %q: %s permits/s.\n%s\n", plural(d.instances, "gateway uses", "gateways share"), bucketName,
		number(d.rate), b.about)
	fmt.Fprintf(d.out, "%s. About %d bookings and %d searches are offered a second:\n%v with one priority for all, then %v with the lowest for searches.\n\n",
		d.describeWait(), bookingsPer, searchesPer, d.duration/2, d.duration/2)
	for _, half := range []struct {
		name     string
		searches tokenbucket.Priority
	}{{"one priority for all", tokenbucket.Normal}, {"searches have the lowest priority", tokenbucket.Lowest}} {
		booked, searched := d.offerBoth(ctx, bookings, half.searches)
		d.printHalf(half.name, booked, searched)
	}
	if ctx.Err() != nil {
		return nil // ended early
	}
	fmt.Fprintln(d.out, "What you saw: nothing was set aside for bookings, and searches had every permit that bookings left. A search takes permits")
	fmt.Fprintln(d.out, "from less far ahead than a booking, so a booking waits for few of them. More: docs/priority.md")
	return nil
}

// offerBoth offers bookings and searches to all gateways for half of the duration, and waits for the calls in flight.
func (d *demo) offerBoth(ctx context.Context, gateways []*tokenbucket.RateLimiter, priority tokenbucket.Priority) (booked, searched *calls) {
	booked, searched = &calls{}, &calls{}
	ctx, cancel := context.WithTimeout(ctx, d.duration/2)
	defer cancel()
	var offering sync.WaitGroup
	for _, l := range gateways {
		offering.Go(func() { booked.offer(ctx, l, bookingsPer/float64(len(gateways))) })
		offering.Go(func() { searched.offer(ctx, l.ForPriority(priority), searchesPer/float64(len(gateways))) })
	}
	offering.Wait()
	return booked, searched
}

// printHalf prints what became of the calls of one half.
func (d *demo) printHalf(name string, booked, searched *calls) {
	t := table.NewWriter()
	t.SetOutputMirror(d.out)
	t.SetStyle(table.StyleLight)
	t.Style().Format.Header = text.FormatDefault
	header := table.Row{name, "offered", "passed", "refused", "waited p50", "waited p99", "errors"}
	t.AppendHeader(header)
	t.SetColumnConfigs(alignRight(len(header))[1:])
	for _, class := range []struct {
		name string
		*calls
	}{{"bookings", booked}, {"searches", searched}} {
		p50, p99 := "-", "-"
		if slices.Sort(class.waits); len(class.waits) > 0 {
			p50, p99 = milliseconds(quantile(class.waits, 0.5)), milliseconds(quantile(class.waits, 0.99))
		}
		t.AppendRow(table.Row{class.name, class.offered, len(class.waits), class.refused, p50, p99, class.failed})
	}
	t.Render()
	for _, err := range []error{booked.err, searched.err} {
		if err != nil {
			fmt.Fprintf(d.out, "The last error: %v\n", err)
		}
	}
	fmt.Fprintln(d.out)
}

// calls counts the calls of one kind. It is safe for concurrent use while they are offered.
type calls struct {
	mu      sync.Mutex
	offered int
	refused int
	failed  int
	waits   []time.Duration // of those that passed
	err     error           // the last one
}

// offer makes calls at random times until ctx ends, and waits for them.
func (c *calls) offer(ctx context.Context, l *tokenbucket.RateLimiter, perSecond float64) {
	var running sync.WaitGroup
	defer running.Wait()
	last := context.WithoutCancel(ctx) // waiting calls are not cancelled
	for next := time.Now(); ; {
		next = next.Add(time.Duration(rand.ExpFloat64() / perSecond * float64(time.Second)))
		if !sleepUntil(ctx, next) {
			return
		}
		running.Go(func() { c.call(last, l) })
	}
}

// call makes one call.
func (c *calls) call(ctx context.Context, l *tokenbucket.RateLimiter) {
	began := time.Now()
	ok, err := l.Try(ctx)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch c.offered++; {
	case err != nil:
		c.failed++
		c.err = err
	case !ok:
		c.refused++
	default:
		c.waits = append(c.waits, time.Since(began))
	}
}

package semaphore

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/batch"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// transport takes the batches of one coordinator to the backend, one at a time, and brings the answers back. A caller makes the trip itself
// only if every call of the backend returns at its context's deadline: from one that hangs nothing would call it back.
type transport struct {
	backend Backend
	trips   batch.Trips[*flight, *Report]
	until   script.Until // the deadlines of callers' own trips
}

// init prepares it for batches that take so long at most; run starts goroutines.
func (t *transport) init(backend Backend, timeout time.Duration, run func(func())) {
	t.backend = backend
	t.trips.Send, t.trips.Max, t.trips.Parallel, t.trips.Go = t.send, 1, 1, run
	if r, ok := backend.(*redisBackend); ok && script.HeedsDeadline(r.client) {
		t.trips.Direct, t.trips.Timeout = t.direct, timeout
	}
}

// ready makes sure that a batch departs after this call. The coordinator may be locked.
func (t *transport) ready(c *coordinator) { t.trips.Ready("", c) }

// take is ready, but the caller may make the trip itself. The coordinator must not be locked.
func (t *transport) take(ctx context.Context, c *coordinator) {
	c.tasks.begin()
	defer c.tasks.end()
	t.trips.Take(ctx, "", c)
}

// send asks the backend in a goroutine of its own.
func (t *transport) send(_ string, items []*batch.Item[*flight, *Report]) {
	for _, i := range items {
		ctx, cancel := context.WithDeadline(context.Background(), i.Deadline)
		report, err := t.backend.Apply(ctx, &i.Batch.batch)
		cancel()
		i.Answer(report, err)
	}
}

// direct is send in the goroutine of a caller. Its context ends before the deadline, and nothing is decided after that: what was asked
// for is being given back.
func (t *transport) direct(_ string, items []*batch.Item[*flight, *Report]) {
	for _, i := range items {
		ctx, b := t.until.Context(i.Deadline), &i.Batch.batch
		if end, _ := ctx.Deadline(); b.Deadline != 0 {
			b.Deadline -= i.Deadline.Sub(end).Microseconds()
		}
		i.Answer(t.backend.Apply(ctx, b))
	}
}

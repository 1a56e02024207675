package semaphore

import (
	"context"
	"strconv"
	"sync"
	"time"
)

// arrival is a request of a known time.
type arrival struct {
	At        int64 // microseconds after the start
	Semaphore int   // which of the job's
	N         int
	Hold      time.Duration
}

// queue is a process whose waiters come at known times: "ready"; then the command "go T" sets the start. For each "turn":
// Acquire was called at Call, and returned At. Then "end": N is how late the process was woken at worst, in microseconds.
func queue(c *child) error {
	c.tell(event{What: "ready"})
	for command := range c.commands {
		start, err := strconv.ParseInt(command[1], 10, 64)
		if err != nil {
			return err
		}
		var running sync.WaitGroup
		late := int64(0)
		measured, stop := context.WithCancel(c.ctx)
		var measuring sync.WaitGroup
		measuring.Go(func() {
			punctual(measured, func(_, _ time.Time, by time.Duration) { late = max(late, by.Microseconds()) })
		})
		for _, a := range c.Arrivals {
			running.Go(func() {
				time.Sleep(micros(start + a.At - now()))
				e := event{What: "turn", N: a.N, Text: c.Semaphores[a.Semaphore].Name, Call: now()}
				p, err := c.semaphores[a.Semaphore].Acquire(c.ctx, a.N)
				if err != nil {
					c.tell(event{What: "failed", Text: err.Error()})
					return
				}
				e.At, e.ID, e.Fence = now(), p.ID(), p.Fence()
				time.Sleep(a.Hold)
				if err := p.Release(ctx); err != nil {
					c.tell(event{What: "failed", Text: err.Error()})
				}
				c.tell(e)
			})
		}
		running.Wait()
		stop()
		measuring.Wait()
		c.tell(event{What: "end", N: int(late)})
	}
	return nil
}

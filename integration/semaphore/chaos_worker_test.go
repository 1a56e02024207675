package semaphore

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// chaos is a process whose workers acquire permits in every way there is, hold them, and give them back once or twice, or
// leave that to another process: the command "done ID" is to give back another's. Its events:
//
//	held      a permit was acquired: from Call to At
//	end       it is not believed to be held from At on: Text says why, "given back" before that is done
//	released  the answer to Release: Text
//	done      the answer to Done of another's permit
//	without   a wait ended without a permit: Text
//	late      this process was woken late: from Call to At, by N microseconds
func chaos(c *child) error {
	var running sync.WaitGroup
	for i := range c.Workers {
		w := &chaosWorker{child: c, s: c.semaphores[0], r: rand.New(rand.NewPCG(c.Seed, uint64(i)))}
		running.Go(func() {
			for c.ctx.Err() == nil {
				w.once()
			}
		})
	}
	running.Go(func() {
		punctual(c.ctx, func(from, to time.Time, by time.Duration) {
			c.tell(event{What: "late", Call: from.UnixMicro(), At: to.UnixMicro(), N: int(by.Microseconds())})
		})
	})
	group := semaphore.NewGroup(c.semaphores[0])
	for command := range c.commands {
		running.Go(func() {
			e := event{What: "done", ID: command[1], Call: now()}
			e.Text = answer(group.Done(ctx, e.ID))
			c.tell(e)
		})
	}
	running.Wait()
	return nil
}

// answer of a release in a word: "" it was held; "not held"; "unknown".
func answer(err error) string {
	switch {
	case err == nil:
		return ""
	case errors.Is(err, semaphore.ErrLost), errors.Is(err, semaphore.ErrNotHeld):
		return "not held"
	default:
		return "unknown: " + err.Error()
	}
}

type chaosWorker struct {
	*child
	s *semaphore.Semaphore
	r *rand.Rand
}

func (w *chaosWorker) once() {
	call := now()
	p, why := w.acquire()
	if p == nil {
		w.tell(event{What: "without", Text: why})
		select {
		case <-time.After(time.Duration(5+w.r.IntN(20)) * time.Millisecond):
		case <-w.ctx.Done():
		}
		return
	}
	at := now()
	held := event{What: "held", ID: p.ID(), Fence: p.Fence(), N: p.Permits(), Call: call, At: at}
	lease := w.Semaphores[0].Lease
	work := time.Duration(w.r.ExpFloat64() * 3 * float64(time.Millisecond))
	switch w.r.IntN(200) {
	case 0, 1, 2: // long enough to be renewed, or killed
		work = lease + time.Duration(w.r.Int64N(int64(lease)))
	case 3, 4, 5, 6:
		work, held.Text = 2*lease, "to be given back by another"
	}
	w.tell(held)
	timer := time.NewTimer(work)
	defer timer.Stop()
	ended := event{What: "end", Fence: p.Fence(), Text: "given back"}
	select {
	case <-timer.C:
	case <-w.ctx.Done():
	case <-p.Context().Done():
		ended.Text = context.Cause(p.Context()).Error()
	}
	ended.At = now()
	w.tell(ended)
	w.release(p)
}

// acquire returns nil, and why there is no permit.
func (w *chaosWorker) acquire() (*semaphore.Permit, string) {
	n := 1
	if w.r.IntN(8) == 0 {
		n = 2 + w.r.IntN(2)
	}
	var p *semaphore.Permit
	var err error
	switch k := w.r.IntN(4); k {
	case 0, 1:
		if p, err = w.s.TryAcquire(w.ctx, n, time.Duration(k*w.r.IntN(60))*time.Millisecond); errors.Is(err, semaphore.ErrRefused) {
			return nil, "refused"
		}
	case 2:
		limited, cancel := context.WithTimeout(w.ctx, time.Duration(1+w.r.IntN(400))*time.Millisecond)
		defer cancel()
		p, err = w.s.Acquire(limited, n)
	default:
		p, err = w.s.Acquire(w.ctx, n)
	}
	switch {
	case err == nil:
		return p, ""
	case errors.Is(err, semaphore.ErrStoreTimeout):
		return nil, "no answer"
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return nil, "cancelled"
	default:
		return nil, "error: " + err.Error()
	}
}

func (w *chaosWorker) release(p *semaphore.Permit) {
	var releases sync.WaitGroup
	times := 1
	if w.r.IntN(5) == 0 {
		times = 2
	}
	answers := make([]string, times)
	call := now()
	for i := range times {
		releases.Go(func() { answers[i] = answer(p.Release(ctx)) })
		if w.r.IntN(2) == 0 { // one after the other
			releases.Wait()
		}
	}
	releases.Wait()
	e := event{What: "released", Fence: p.Fence(), Call: call, Text: answers[0], N: times}
	if times == 2 && answers[0] != answers[1] {
		e.ID = "released twice: " + answers[0] + " and " + answers[1]
	}
	w.tell(e)
}

// punctual reports each time that this process was woken late, until ctx ends.
func punctual(ctx context.Context, late func(from, to time.Time, by time.Duration)) {
	const pause = 5 * time.Millisecond
	for ctx.Err() == nil {
		began := time.Now()
		time.Sleep(pause)
		if by := time.Since(began) - pause; by > time.Millisecond {
			late(began, time.Now(), by)
		}
	}
}

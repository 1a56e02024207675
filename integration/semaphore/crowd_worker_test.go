package semaphore

import (
	"context"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// crowd is a process of which very many wait at once. Its commands:
//
//	quota N once|again  the next N that acquire release at once, and want it again or not; then one keeps it: "reached".
//	                    One that is kept is released: after "set".
//	wait N MS           N more wait; they arrive one by one within MS milliseconds
//	usage               "usage": N is the bytes of heap and stacks in use
//	cpu                 "cpu": Call is the processor time in microseconds
//	series              "turn" for each permit that was released: acquired At, released at Call; then "end"
//	stop                ends all waits: "stopped"
func crowd(c *child) error {
	w := &crowdWorker{child: c, resume: make(chan struct{}, 1)}
	w.begin()
	defer func() { w.end() }()
	for command := range c.commands {
		number := func(i int) int {
			n, _ := strconv.Atoi(command[i])
			return n
		}
		switch command[0] {
		case "quota":
			w.again.Store(command[2] == "again")
			w.left.Store(int64(number(1)))
			c.tell(event{What: "set"})
			if w.kept.CompareAndSwap(true, false) {
				w.resume <- struct{}{}
			}
		case "wait":
			n := number(1)
			within := time.Duration(number(2)) * time.Millisecond
			began := time.Now()
			for i := range n {
				if ahead := time.Until(began.Add(within * time.Duration(i) / time.Duration(n))); ahead > time.Millisecond {
					time.Sleep(ahead)
				}
				w.running.Go(w.wait)
			}
		case "usage":
			debug.FreeOSMemory()
			var mem runtime.MemStats
			runtime.ReadMemStats(&mem)
			c.tell(event{What: "usage", N: int(mem.HeapAlloc + mem.StackInuse)})
		case "cpu":
			var used syscall.Rusage
			if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
				return err
			}
			c.tell(event{What: "cpu", Call: (used.Utime.Nano() + used.Stime.Nano()) / 1000})
		case "series":
			w.turnsMu.Lock()
			for _, e := range w.turns {
				c.tell(e)
			}
			w.turns = nil
			w.turnsMu.Unlock()
			c.tell(event{What: "end"})
		case "stop":
			w.end()
			w.begin()
			c.tell(event{What: "stopped"})
		}
	}
	return nil
}

type crowdWorker struct {
	*child
	waits   context.Context
	cancel  context.CancelFunc
	running sync.WaitGroup

	left   atomic.Int64
	again  atomic.Bool
	kept   atomic.Bool
	resume chan struct{}

	turnsMu sync.Mutex
	turns   []event
}

func (w *crowdWorker) begin() { w.waits, w.cancel = context.WithCancel(w.ctx) }

func (w *crowdWorker) end() {
	w.cancel()
	w.running.Wait()
	w.kept.Store(false)
}

func (w *crowdWorker) wait() {
	for {
		p, err := w.semaphores[0].Acquire(w.waits, 1)
		if err != nil {
			if w.waits.Err() == nil {
				w.tell(event{What: "failed", Text: err.Error()})
			}
			return
		}
		e := event{What: "turn", Fence: p.Fence(), At: now()}
		if w.left.Add(-1) == 0 {
			w.kept.Store(true)
			w.tell(event{What: "reached"})
			select {
			case <-w.resume:
			case <-w.waits.Done():
			}
		}
		e.Call = now()
		if err := p.Release(ctx); err != nil {
			w.tell(event{What: "failed", Text: err.Error()})
		}
		w.turnsMu.Lock()
		w.turns = append(w.turns, e)
		w.turnsMu.Unlock()
		if !w.again.Load() {
			return
		}
	}
}

package registry

import (
	"context"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/telemetry"
)

// Fault is a bucket, a window or a concurrency that must be repaired by an operator: its key has another type, its state was not written by
// this library, or a right is missing. Its calls fail under every policy. An outage of a store is not a fault.
type Fault struct {
	// Name of the row, empty if no row decides (Default), and of the Bucket, which differs if the row has a bucket for each key.
	Name, Bucket string
	// By is the limit that fails: ByLimit, ByWindow or ByConcurrency.
	By gate.Decider
	// Err of the last failed call; Calls have failed Since then.
	Err   error
	Since time.Time
	Calls int

	entry *entry    // of the last failed call
	last  time.Time // when the last call failed
}

// mostFaults bounds the number of faults that are kept, as a row may have a bucket for each key. Calls of further faults are only counted.
const mostFaults = 100

// faults are the present faults. Each ends with the next call of its bucket that passes, or if there is no call, once its state can be read
// (Registry.recheck).
type faults struct {
	some atomic.Bool // whether kept has any

	mu    sync.Mutex // guards the fields below
	kept  map[faulty]*Fault
	fresh []faulty // not logged yet
	calls int
}

// faulty identifies a fault.
type faulty struct {
	bucket string
	by     gate.Decider
}

// isFault reports whether an error means a fault: neither an outage nor a mistake of the caller.
func isFault(err error) bool {
	if err == nil {
		return false
	}
	kind := telemetry.KindOf(err)
	return kind == telemetry.KindCorrupt || kind == telemetry.KindOther
}

// failed records a call that has failed with err when it asked the limit by.
func (f *faults) failed(e *entry, by gate.Decider, err error) {
	if !isFault(err) {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls++
	key := faulty{e.limit.Name, by}
	known := f.kept[key]
	if known == nil {
		if len(f.kept) >= mostFaults {
			return
		}
		if f.kept == nil {
			f.kept = map[faulty]*Fault{}
		}
		known = &Fault{Name: e.row(), Bucket: e.limit.Name, By: by, Since: time.Now()}
		f.kept[key] = known
		f.fresh = append(f.fresh, key)
		f.some.Store(true)
	}
	known.Err, known.entry, known.last = err, e, time.Now()
	known.Calls++
}

// passed ends the faults of a bucket after a call that has passed.
func (f *faults) passed(e *entry) {
	if f.some.Load() {
		f.drop(func(fault *Fault) bool { return fault.Bucket == e.limit.Name })
	}
}

// idle returns the faults without a failed call since a time.
func (f *faults) idle(since time.Time) (all []Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, fault := range f.kept {
		if fault.last.Before(since) {
			all = append(all, *fault)
		}
	}
	return all
}

// recheck ends the faults that have had no call for a while and whose state can be read again, since no call may come that passes.
func (r *Registry) recheck(ctx context.Context) {
	idle := r.faults.idle(time.Now().Add(-again / 2))
	if len(idle) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, slowLoad)
	defer cancel()
	repaired := make([]bool, len(idle))
	var asking sync.WaitGroup
	for i := range idle {
		asking.Go(func() { repaired[i] = r.readable(ctx, &idle[i]) == nil }) // reads in flight together share round trips
	}
	asking.Wait()
	for i := range idle {
		if repaired[i] {
			r.faults.drop(func(f *Fault) bool {
				return f.Bucket == idle[i].Bucket && f.By == idle[i].By && f.last.Equal(idle[i].last)
			})
		}
	}
}

// readable reads the state of what a fault is about, and returns its error.
func (r *Registry) readable(ctx context.Context, f *Fault) error {
	if f.By != gate.ByLimit {
		_, _, err := f.entry.slot.Usage(ctx)
		return err
	}
	l, err := r.limiterOf(f.entry)
	if err == nil {
		_, err = l.State(ctx)
	}
	return err
}

// drop removes the faults for which ended returns true.
func (f *faults) drop(ended func(*Fault) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for key, fault := range f.kept {
		if ended(fault) {
			delete(f.kept, key)
		}
	}
	f.some.Store(len(f.kept) > 0)
}

// all returns the present faults, sorted by bucket, and the number of calls that have failed by faults so far.
func (f *faults) all() (last []Fault, calls int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, fault := range f.kept {
		last = append(last, *fault)
	}
	slices.SortFunc(last, func(a, b Fault) int {
		if a.Bucket != b.Bucket {
			return strings.Compare(a.Bucket, b.Bucket)
		}
		return int(a.By) - int(b.By)
	})
	return last, f.calls
}

// unlogged returns the present faults that were not logged yet.
func (f *faults) unlogged() (fresh []Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, key := range f.fresh {
		if fault := f.kept[key]; fault != nil {
			fresh = append(fresh, *fault)
		}
	}
	f.fresh = nil
	return fresh
}

// row returns the name of the entry's row; empty if it has none.
func (e *entry) row() string {
	switch {
	case e.of != nil:
		return e.of.limit.Name
	case e.unnamed:
		return ""
	case e.bad:
		return e.name
	}
	return e.limit.Name
}

func (r *Registry) logFaults(faults []Fault) {
	for i := range faults {
		if i == mostLogged {
			r.log.Error("registry: calls of further rows fail, see Stats", "faults", len(faults)-i)
			return
		}
		f := &faults[i]
		r.log.Error("registry: calls of a row fail until its bucket, window or concurrency is repaired", "bucket", f.Bucket, "by", f.By.String(),
			"calls", f.Calls, "error", f.Err)
	}
}

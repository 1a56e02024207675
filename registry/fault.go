package registry

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry/internal/rows"
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
}

// faults are the present faults.
type faults struct {
	some  atomic.Bool  // whether there are any
	calls atomic.Int64 // that faults have failed

	mu sync.Mutex // guards the rest
	rows.Faults[gate.Decider, failure]
}

type fault = rows.Fault[gate.Decider, failure]

// failure is a failed call.
type failure struct {
	entry *entry
	err   error
}

// do calls a function with the faults locked.
func (f *faults) do(act func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	act()
	f.some.Store(!f.None())
}

// failed records a call that has failed with err when it asked the limit by. An outage is no fault, and neither is a mistake of the caller.
func (f *faults) failed(e *entry, by gate.Decider, err error) {
	if kind := telemetry.KindOf(err); err != nil && (kind == telemetry.KindCorrupt || kind == telemetry.KindOther) {
		f.calls.Add(1)
		f.do(func() { f.Failed(time.Now(), e.row(), e.limit.Name, by, failure{e, err}) })
	}
}

// asks reports whether calls ask the limit of a fault.
func (b *book) asks(f *fault) bool {
	e := b.rows[f.Row]
	switch {
	case f.Row == "":
		name := f.Of.entry.name
		return b.rows[name] == nil && b.wide.find(name) == nil
	case e == nil, e.limit.Disabled, !e.limit.PerKey && f.Bucket != e.limit.Name:
		return false
	case f.By == gate.ByWindow:
		return e.limit.Window != 0
	case f.By == gate.ByConcurrency:
		return e.limit.Concurrent != 0
	}
	return e.limit.Rate != 0
}

// passed records a call that has passed.
func (f *faults) passed(e *entry) {
	if f.some.Load() {
		f.do(func() { f.Passed(e.limit.Name) })
	}
}

// recheck reads the states of the faults that have had no call for a while.
func (r *Registry) recheck(ctx context.Context) {
	now := time.Now()
	idle := r.faults.present(func(f *fault) bool { return f.Idle(now) })
	ctx, cancel := context.WithTimeout(ctx, slowLoad)
	defer cancel()
	var asking sync.WaitGroup
	for i := range idle {
		asking.Go(func() { // reads in flight together share round trips
			if is := &idle[i]; r.readable(ctx, is.Of.entry, is.By) == nil {
				r.faults.do(func() { r.faults.Readable(is) })
			}
		})
	}
	asking.Wait()
}

// readable reads the state of a limit, and returns its error.
func (r *Registry) readable(ctx context.Context, e *entry, by gate.Decider) error {
	if by != gate.ByLimit {
		_, _, err := e.slot.Usage(ctx)
		return err
	}
	l, err := r.limiterOf(e)
	if err == nil {
		_, err = l.State(ctx)
	}
	return err
}

// present returns the present faults for which is returns true.
func (f *faults) present(is func(*fault) bool) []fault {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.Present(is)
}

// listed returns present faults as Stats has them.
func (f *faults) listed(is func(*fault) bool) (all []Fault) {
	for _, is := range f.present(is) {
		all = append(all, Fault{is.Row, is.Bucket, is.By, is.Of.err, is.Since, is.Calls})
	}
	return all
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

package registry

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
)

// Fault is a bucket, a window or a concurrency that cannot be used until somebody repairs it: its key is of another type, its state is none of
// this library, a right is missing. Its calls fail, under every policy. An outage of a store is no fault.
type Fault struct {
	// Name of the row, and of the Bucket: another one if the row has one for each key. Name is empty if no row decides (Default).
	Name, Bucket string
	// By is what cannot be used: ByLimit, ByWindow or ByConcurrency.
	By gate.Decider
	// Err of the last call that failed so, of so many Calls since then.
	Err   error
	Since time.Time
	Calls int
}

// mostFaults bounds how many faults are kept, as a row may have a bucket for each key. Calls of others are counted.
const mostFaults = 100

// faults are those that last: each ends with a call of its bucket that passes.
type faults struct {
	some atomic.Bool // whether there are any

	mu    sync.Mutex // guards these
	kept  map[faulty]*Fault
	fresh []faulty // that were not logged yet
	calls int
}

type faulty struct {
	bucket string
	by     gate.Decider
}

// isFault reports whether an error is one that neither time nor the caller mends.
func isFault(err error) bool {
	if err == nil {
		return false
	}
	kind := telemetry.KindOf(err)
	return kind == telemetry.Corrupt || kind == telemetry.Other
}

// failed notes the error of a call that by has failed.
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
	known.Err = err
	known.Calls++
}

// passed notes that a call has passed: all that it asked can be used.
func (f *faults) passed(e *entry) {
	if f.some.Load() {
		f.drop(func(fault *Fault) bool { return fault.Bucket == e.limit.Name })
	}
}

// drop forgets the faults for which ended is true.
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

// all returns the faults that last, by bucket, and how many calls have failed so in all.
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

// unlogged returns the faults that last and were not logged yet.
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

// row is the name of the row that an entry is of; empty if there is none.
func (e *entry) row() string {
	switch {
	case e.of != nil:
		return e.of.limit.Name
	case e.strange:
		return ""
	}
	return e.limit.Name
}

func (r *Registry) logFaults(faults []Fault) {
	for i := range faults {
		if i == mostTold {
			r.log.Error("registry: calls of further rows fail, see Stats", "faults", len(faults)-i)
			return
		}
		f := &faults[i]
		r.log.Error("registry: calls of a row fail until somebody repairs what it is counted in", "bucket", f.Bucket, "by", f.By.String(),
			"calls", f.Calls, "error", f.Err)
	}
}

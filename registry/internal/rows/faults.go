package rows

import (
	"cmp"
	"maps"
	"slices"
	"time"
)

// Fault is a limit of a bucket whose calls fail until an operator repairs it. By is which limit of the row it is.
type Fault[By cmp.Ordered, V any] struct {
	Row, Bucket string // Row is empty if no row decides
	By          By
	Since, Last time.Time // when its first and its last call failed
	Calls       int       // that have failed
	Of          V         // given with the last failed call
}

// faulty identifies a fault.
type faulty[By cmp.Ordered] struct {
	bucket string
	by     By
}

const (
	mostFaults = 100              // that are kept, as a row may have a bucket for each key. Calls of further ones are only counted
	idleAfter  = 30 * time.Second // without a call the state of a fault is read, since no call may come that passes
)

// Faults has the present faults. A fault begins with a call that fails. It ends with a call of its bucket that passes, with a load after which no call
// asks the limit, and when its state can be read and no call has failed meanwhile. It is not safe for concurrent use. The zero value has none.
type Faults[By cmp.Ordered, V any] struct{ kept map[faulty[By]]*Fault[By, V] }

// Failed records a call that has failed.
func (f *Faults[By, V]) Failed(now time.Time, row, bucket string, by By, of V) {
	key := faulty[By]{bucket, by}
	if f.kept[key] == nil {
		if len(f.kept) >= mostFaults {
			return
		}
		if f.kept == nil {
			f.kept = map[faulty[By]]*Fault[By, V]{}
		}
		f.kept[key] = &Fault[By, V]{Row: row, Bucket: bucket, By: by, Since: now}
	}
	is := f.kept[key]
	is.Last, is.Of = now, of
	is.Calls++
}

// Passed records a call that has passed.
func (f *Faults[By, V]) Passed(bucket string) {
	maps.DeleteFunc(f.kept, func(key faulty[By], _ *Fault[By, V]) bool { return key.bucket == bucket })
}

// Loaded records a load after which calls ask the limits for which asked returns true.
func (f *Faults[By, V]) Loaded(asked func(*Fault[By, V]) bool) {
	maps.DeleteFunc(f.kept, func(_ faulty[By], is *Fault[By, V]) bool { return !asked(is) })
}

// Readable records that the state of a fault could be read.
func (f *Faults[By, V]) Readable(was *Fault[By, V]) {
	key := faulty[By]{was.Bucket, was.By}
	if is := f.kept[key]; is != nil && is.Last.Equal(was.Last) {
		delete(f.kept, key)
	}
}

// Idle reports whether a fault has had no call for a while.
func (f *Fault[By, V]) Idle(now time.Time) bool { return now.Sub(f.Last) > idleAfter }

// Present returns the faults for which is returns true, in order.
func (f *Faults[By, V]) Present(is func(*Fault[By, V]) bool) (all []Fault[By, V]) {
	for _, fault := range f.kept {
		if is(fault) {
			all = append(all, *fault)
		}
	}
	slices.SortFunc(all, func(a, b Fault[By, V]) int {
		return cmp.Or(cmp.Compare(a.Bucket, b.Bucket), cmp.Compare(a.By, b.By))
	})
	return all
}

// None reports whether there are none.
func (f *Faults[By, V]) None() bool { return len(f.kept) == 0 }

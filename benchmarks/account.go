package main

import (
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/go-tokenbucket/tokenbucket"
)

// tolerance returns the allowed error, in permits. The buckets' arithmetic is in float64, and ignores a missing billionth of a permit.
func tolerance(granted int64) float64 { return 1e-3 + 1e-9*float64(granted) }

// account audits buckets of this library during a measurement.
type account struct {
	buckets *tokenBuckets
	begun   []tokenbucket.PermitBucket // before the first permit was taken
	since   []tokenbucket.PermitBucket // after the first permit was taken
	first   int64                      // permits taken between begun and since
	granted int64                      // permits taken after since
}

// openAccount takes a permit from each bucket, so that all exist, and records their state.
func openAccount(t *tokenBuckets) (*account, error) {
	a := &account{buckets: t}
	var err error
	if a.begun, err = t.states(); err != nil {
		return nil, err
	}
	for key := range t.limiters {
		granted, err := t.Take(key)
		if err != nil {
			return nil, err
		}
		if granted {
			a.first++
		}
	}
	a.since, err = t.states()
	return a, err
}

// states reads the state of all buckets, many of them concurrently, since there may be thousands.
func (t *tokenBuckets) states() ([]tokenbucket.PermitBucket, error) {
	all := make([]tokenbucket.PermitBucket, len(t.limiters))
	var next atomic.Int64
	var failed atomic.Pointer[error]
	var workers sync.WaitGroup
	for range min(connections, len(all)) {
		workers.Go(func() {
			for i := next.Add(1) - 1; i < int64(len(all)) && failed.Load() == nil; i = next.Add(1) - 1 {
				var err error
				if all[i], err = t.limiters[i].State(background); err != nil {
					failed.Store(&err)
				}
			}
		})
	}
	workers.Wait()
	if err := failed.Load(); err != nil {
		return nil, *err
	}
	return all, nil
}

// check compares the granted permits with the state of the buckets.
func (a *account) check() error {
	now, err := a.buckets.states()
	if err != nil {
		return err
	}
	if err := a.checkBound(now); err != nil {
		return err
	}
	if !a.buckets.exact {
		return nil
	}
	return a.checkSum(now)
}

// checkBound checks that no more permits were granted than the buckets held, plus those accrued, plus one.
func (a *account) checkBound(now []tokenbucket.PermitBucket) error {
	var most float64
	for i := range now {
		elapsed := float64(now[i].SeenMicros-a.begun[i].SeenMicros) + 1
		most += a.begun[i].StoredPermits + elapsed/now[i].IntervalMicros + 1
	}
	if granted := float64(a.first + a.granted); granted > most {
		return fmt.Errorf("the bound is broken: %.0f permits granted, of at most %.3f (stored at the start + rate × elapsed + 1)", granted, most)
	}
	return nil
}

// checkSum checks that the permits missing from the buckets equal the granted ones exactly. A bucket that was full in between has lost what
// accrued; its new epoch shows that.
func (a *account) checkSum(now []tokenbucket.PermitBucket) error {
	var missing float64
	for i := range now {
		if now[i].Epoch != a.since[i].Epoch {
			if a.buckets.limit.Start > 0 {
				return fmt.Errorf("bucket %s overflowed or was lost, which its size rules out", now[i].Name)
			}
			return nil
		}
		accrued := float64(now[i].SeenMicros-a.since[i].SeenMicros) / now[i].IntervalMicros
		missing += worth(&a.since[i]) + accrued - worth(&now[i])
	}
	if d := math.Abs(missing - float64(a.granted)); d > tolerance(a.granted) {
		return fmt.Errorf("the account is wrong: %d permits granted, %.6f missing from the buckets", a.granted, missing)
	}
	return nil
}

// worth returns the stored permits of a bucket minus its debt.
func worth(b *tokenbucket.PermitBucket) float64 {
	owed := float64(b.NextFreeTicketMicros-b.SeenMicros) - b.CarryMicros
	return b.StoredPermits - owed/b.IntervalMicros
}

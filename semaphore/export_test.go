package semaphore

import "github.com/go-tokenbucket/tokenbucket/semaphore/store"

// StoreOf returns the store of a fleet's semaphore.
func StoreOf(s *Semaphore) store.Store { return s.engine.(*coordinator).transport.store }

// LeavesOf returns the number of queued releases.
func LeavesOf(s *Semaphore) int {
	e := s.engine.(*coordinator)
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.releases.list)
}

// MaxLeaves is the most queued releases without a caller.
const MaxLeaves = maxLeaves

// Stop stops the alarm that ends permits for good, as in a process that was stopped.
func Stop(s *Semaphore) {
	e := s.engine.(*coordinator)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.alarm.stop()
	e.alarm.at = 1
}

// LeftOf returns the number of requests that are not done, of requests that were sent, and of permits held.
func LeftOf(s *Semaphore) (live, sent, held int) {
	e := s.engine.(*coordinator)
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.waiters.live, len(e.waiters.sent), len(e.held.permits)
}

// The scripts of a slot that moves.
var PackScript, LeasesScript = &packScript, &leasesScript

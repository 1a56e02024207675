package semaphore

import "github.com/go-tokenbucket/tokenbucket/semaphore/store"

// StoreOf is where a fleet's semaphore is kept.
func StoreOf(s *Semaphore) store.Store { return s.engine.(*coordinator).transport.store }

// LeavesOf is how many ids are still to be ended.
func LeavesOf(s *Semaphore) int {
	e := s.engine.(*coordinator)
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.releases.list)
}

// MaxLeaves is the most of them that nobody waits for.
const MaxLeaves = maxLeaves

// Stop is what a stopped process is to its timers: the one that ends permits never rings again.
func Stop(s *Semaphore) {
	e := s.engine.(*coordinator)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.alarm.stop()
	e.alarm.at = 1
}

// LeftOf is how many requests a semaphore still has, and what it believes to hold.
func LeftOf(s *Semaphore) (live, sent, held int) {
	e := s.engine.(*coordinator)
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.waiters.live, len(e.waiters.sent), len(e.held.permits)
}

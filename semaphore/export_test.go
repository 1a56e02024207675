package semaphore

// BackendOf is where a fleet's semaphore is kept.
func BackendOf(s *Semaphore) Backend { return s.engine.(*shared).backend }

// LeavesOf is how many ids are still to be ended.
func LeavesOf(s *Semaphore) int {
	e := s.engine.(*shared)
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.leaves)
}

// MaxLeaves is the most of them that nobody waits for.
const MaxLeaves = maxLeaves

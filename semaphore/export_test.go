package semaphore

// BackendOf is where a fleet's semaphore is kept.
func BackendOf(s *Semaphore) Backend { return s.engine.(*shared).backend }

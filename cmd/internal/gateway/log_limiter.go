package gateway

import (
	"sync"
	"time"
)

const (
	// quiet is the minimum time between two log lines of a kind. Events in between are only counted.
	quiet = 10 * time.Second
	// mostKinds bounds the kinds that are tracked.
	mostKinds = 1000
)

// logLimiter limits the rate of log lines, by kind of event. The zero value is ready to use.
type logLimiter struct {
	mu    sync.Mutex
	kinds map[string]*eventCount // guarded by mu
}

// eventCount counts the events of one kind.
type eventCount struct {
	logged time.Time // when an event was last logged
	count  int       // events since then
}

// note counts an event. It reports whether to log it, and how many events the log line stands for.
func (s *logLimiter) note(kind string) (count int, log bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kinds[kind]
	if k == nil {
		if s.kinds == nil || len(s.kinds) >= mostKinds {
			s.kinds = map[string]*eventCount{}
		}
		k = new(eventCount)
		s.kinds[kind] = k
	}
	k.count++
	now := time.Now()
	if now.Sub(k.logged) < quiet {
		return 0, false
	}
	count, k.count, k.logged = k.count, 0, now
	return count, true
}

package gateway

import (
	"sync"
	"time"
)

const (
	// quiet is for how long events of a kind are only counted after one was logged.
	quiet = 10 * time.Second
	// mostKinds bounds what is remembered.
	mostKinds = 1000
)

// seldom keeps events that may be many from flooding the log. The zero value is ready.
type seldom struct {
	mu    sync.Mutex
	kinds map[string]*silence
}

// silence is what is known of one kind of event.
type silence struct {
	told  time.Time
	count int // since then
}

// note counts an event, and tells whether to log it, and for how many it stands.
func (s *seldom) note(kind string) (count int, tell bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k := s.kinds[kind]
	if k == nil {
		if s.kinds == nil || len(s.kinds) >= mostKinds {
			s.kinds = map[string]*silence{}
		}
		k = new(silence)
		s.kinds[kind] = k
	}
	k.count++
	now := time.Now()
	if now.Sub(k.told) < quiet {
		return 0, false
	}
	count, k.count, k.told = k.count, 0, now
	return count, true
}

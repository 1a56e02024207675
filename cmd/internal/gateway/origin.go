package gateway

import (
	"context"
	"strings"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

// namedSwitch is a switch whose origin includes what a console has announced: the user who turned it, and the reason.
type namedSwitch struct {
	*killswitch.Switch
	events func(ctx context.Context, from time.Time) ([]fleet.Event, error)

	mu    sync.Mutex
	asked time.Time // when the events were last read
	by    string    // user and reason, such as "ann: incident 4711"
}

const (
	originAge  = 2 * time.Second        // how long events are cached
	originWait = 500 * time.Millisecond // time limit for reading events from Redis
)

// Origin returns when, by which user and why the switch was turned off, as far as these are known.
func (s *namedSwitch) Origin() string {
	origin := s.Switch.Origin()
	if s.Enabled() || strings.Contains(origin, " by ") {
		return origin
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if time.Since(s.asked) > originAge {
		ctx, cancel := context.WithTimeout(context.Background(), originWait)
		defer cancel()
		if events, err := s.events(ctx, time.Now().Add(-fleet.Day)); err == nil { // on an error, by stays
			s.by = turnedBy(events)
		}
		s.asked = time.Now()
	}
	return strings.TrimSpace(origin + after(" by ", s.by))
}

// turnedBy returns the user who last turned the switch off, and the reason. It returns "" if the switch was turned on later, or if the events
// name no user.
func turnedBy(events []fleet.Event) (by string) {
	for i := range events {
		switch e := &events[i]; {
		case e.Kind == fleet.SwitchOn:
			by = ""
		case e.Kind == fleet.SwitchOff && e.Who != "":
			by = e.Who + after(": ", e.Why)
		}
	}
	return by
}

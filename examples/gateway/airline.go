package main

import (
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// airline is a stub of a booking system. It accepts a fixed number of calls of each kind in any sliding second, and refuses the rest.
type airline struct {
	mux *http.ServeMux

	mu      sync.Mutex
	taken   map[string][]time.Time // calls accepted in the last second
	served  map[string]int
	refused map[string]int
}

func newAirline() *airline {
	a := &airline{
		mux:   http.NewServeMux(),
		taken: map[string][]time.Time{}, served: map[string]int{}, refused: map[string]int{},
	}
	for path, calls := range map[string]struct {
		hardLimit int
		answer    string
	}{
		"/ibe/AvailFare":   {10, `{"flights":[{"flight":"MU5101","fare":1240},{"flight":"CA1501","fare":1310}]}`},
		"/ibe/PnrRetrieve": {5, `{"pnr":"NQ4X2P","segments":1,"status":"HK"}`},
		"/ibe/Ticket":      {2, `{"pnr":"NQ4X2P","ticket":"781-2401556617"}`},
	} {
		a.mux.HandleFunc("POST "+path, func(w http.ResponseWriter, r *http.Request) {
			wait := a.take(path, calls.hardLimit)
			if wait > 0 {
				slog.Warn("the airline refuses", "path", path, "limit", calls.hardLimit, "again", wait.Round(time.Millisecond))
				w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(wait.Seconds()))))
				http.Error(w, fmt.Sprintf("the airline takes %d calls a second", calls.hardLimit), http.StatusTooManyRequests)
				return
			}
			slog.Info("the airline answers", "path", path)
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintln(w, calls.answer)
		})
	}
	return a
}

func (a *airline) ServeHTTP(w http.ResponseWriter, r *http.Request) { a.mux.ServeHTTP(w, r) }

// take accepts a call, and returns 0. If there were too many within the last second, it returns how long until another is accepted.
func (a *airline) take(path string, limit int) (wait time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	now := time.Now()
	recent := a.taken[path]
	for len(recent) > 0 && now.Sub(recent[0]) >= time.Second {
		recent = recent[1:]
	}
	if len(recent) >= limit {
		a.refused[path]++
		a.taken[path] = recent
		return time.Second - now.Sub(recent[0])
	}
	a.taken[path] = append(recent, now)
	a.served[path]++
	return 0
}

// counts returns the number of calls so far, by result.
func (a *airline) counts(path string) (served, refused int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.served[path], a.refused[path]
}

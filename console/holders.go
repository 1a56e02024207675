package console

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// holdersData is the data of the page Semaphores and windows.
type holdersData struct {
	At         time.Time         `json:"at"`
	Problems   []problem         `json:"problems"`
	Semaphores []fleet.Semaphore `json:"semaphores"`
	Windows    []fleet.Window    `json:"windows"`
}

// inUse describes the usage of windows and concurrency, by limit: "312 of 10,000 in 1 d, 7 of 8 at once".
func (v *view) inUse() map[string]string {
	all := map[string]string{}
	h := v.holders()
	for _, w := range h.Windows {
		all[w.Name] = fmt.Sprintf("%s of %s in %s", figure.Count(w.Used), figure.Count(w.Limit), figure.Exact(w.Length))
	}
	for _, s := range h.Semaphores {
		text := fmt.Sprintf("%s of %s at once", figure.Count(s.Used), figure.Count(s.Permits))
		if all[s.Name] != "" {
			text = all[s.Name] + ", " + text
		}
		all[s.Name] = text
	}
	return all
}

// use identifies a limit's window or its concurrency.
type use struct {
	limit  string
	window bool
}

// mostUses bounds the values kept of each use: 15 minutes with a beat of 2 s.
const mostUses = 450

// remembered appends the present usage to the earlier values. Uses that are no longer reported are dropped. Views share the
// slices, so their elements never change.
func (v *view) remembered(before map[use][]float64) map[use][]float64 {
	all := map[use][]float64{}
	add := func(key use, used int64) {
		past := append(before[key], float64(used))
		all[key] = past[max(0, len(past)-mostUses):]
	}
	h := v.holders()
	for _, w := range h.Windows {
		add(use{w.Name, true}, w.Used)
	}
	for _, s := range h.Semaphores {
		add(use{s.Name, false}, int64(s.Used))
	}
	return all
}

// holders returns the state of semaphores and windows. Each is one thing in the whole fleet, so the newest report of a living
// instance counts.
func (v *view) holders() *holdersData {
	h := &holdersData{At: v.at, Problems: v.problems(), Semaphores: []fleet.Semaphore{}, Windows: []fleet.Window{}}
	byBeat := slices.Clone(v.instances)
	slices.SortStableFunc(byBeat, func(a, b instance) int {
		return cmp.Or(cmp.Compare(rank(b.Silent(v.at)), rank(a.Silent(v.at))), a.Beat.Compare(b.Beat))
	})
	semaphores, windows := map[string]fleet.Semaphore{}, map[string]fleet.Window{}
	for i := range byBeat {
		for _, s := range byBeat[i].Semaphores {
			semaphores[s.Name] = s
		}
		for _, w := range byBeat[i].Windows {
			windows[w.Name] = w
		}
	}
	for _, name := range slices.Sorted(maps.Keys(semaphores)) {
		h.Semaphores = append(h.Semaphores, semaphores[name])
	}
	for _, name := range slices.Sorted(maps.Keys(windows)) {
		h.Windows = append(h.Windows, windows[name])
	}
	return h
}

func (c *Console) holdersPage(w http.ResponseWriter, r *http.Request) {
	p := c.page(r, "holders", "Semaphores and windows")
	if v := c.look(r, p); v != nil {
		p.Data = v.holders()
	}
	c.render(w, r, http.StatusOK, p)
}

// holdersFrame returns the same data for the stream.
func (c *Console) holdersFrame(ctx context.Context) []byte {
	v, err := c.board.now(ctx)
	if err != nil {
		return c.lost(err)
	}
	return event("holders", must(json.Marshal(v.holders())))
}

// full returns the tone of a bar: bad if it is used up and refuses, warm from 80 %.
func full[T int | int64](used, of T) string {
	switch {
	case used >= of:
		return "bad"
	case float64(used) >= 0.8*float64(of):
		return "warm"
	}
	return ""
}

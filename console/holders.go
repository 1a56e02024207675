package console

import (
	"cmp"
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// holdersData is the screen Semaphores and windows.
type holdersData struct {
	At         time.Time         `json:"at"`
	Problems   []string          `json:"problems"`
	Semaphores []fleet.Semaphore `json:"semaphores"`
	Windows    []fleet.Window    `json:"windows"`
}

// holders are what the instances say of semaphores and windows: each is one thing in the whole fleet, so of each the word of the
// instance counts that lives and was heard last.
func (v *view) holders() *holdersData {
	h := &holdersData{At: v.at, Problems: v.problems(), Semaphores: []fleet.Semaphore{}, Windows: []fleet.Window{}}
	heard := slices.Clone(v.instances)
	slices.SortStableFunc(heard, func(a, b instance) int {
		return cmp.Or(cmp.Compare(rank(b.Silent(v.at)), rank(a.Silent(v.at))), a.Beat.Compare(b.Beat))
	})
	semaphores, windows := map[string]fleet.Semaphore{}, map[string]fleet.Window{}
	for i := range heard {
		for _, s := range heard[i].Semaphores {
			semaphores[s.Name] = s
		}
		for _, w := range heard[i].Windows {
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

// holdersFrame is the same for who looks on.
func (c *Console) holdersFrame(ctx context.Context) []byte {
	v, err := c.board.now(ctx)
	if err != nil {
		return event("lost", must(json.Marshal(lost(err))))
	}
	return event("holders", must(json.Marshal(v.holders())))
}

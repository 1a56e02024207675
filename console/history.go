package console

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// history is what a chart begins with: columns, as uPlot wants them. Rates are per second; null: not known.
type history struct {
	At      []int64    `json:"at"` // seconds since 1970
	Granted []*float64 `json:"granted"`
	Refused []*float64 `json:"refused"`
	Waited  []*float64 `json:"waited"`
	Rate    []*float64 `json:"rate"`
	Marks   []mark     `json:"marks"`
}

// mark is something that happened.
type mark struct {
	At   int64  `json:"at"` // seconds since 1970
	Kind string `json:"kind"`
	Text string `json:"text"`
}

// history answers what became of a limit's calls: of the last day, or of as many minutes as are asked for.
func (c *Console) history(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), readTimeout)
	defer cancel()
	name, now := r.URL.Query().Get("name"), time.Now()
	back := fleet.Day
	if r.URL.Query().Get("span") == "minutes" {
		back = 15 * time.Minute
	}
	points, err := c.config.Source.History(ctx, name, now.Add(-back))
	if err != nil {
		c.refuse(w, r, &refusal{http.StatusBadGateway, "The history cannot be read: " + err.Error()})
		return
	}
	events, err := c.config.Source.Events(ctx, now.Add(-back))
	if err != nil {
		c.refuse(w, r, &refusal{http.StatusBadGateway, "What happened cannot be read: " + err.Error()})
		return
	}
	h := columns(points, now)
	h.Marks = marks(events, name)
	writeJSON(w, http.StatusOK, h)
}

func columns(points []fleet.Point, now time.Time) *history {
	h := &history{At: []int64{}, Granted: []*float64{}, Refused: []*float64{}, Waited: []*float64{}, Rate: []*float64{}}
	for i := range points {
		p := &points[i]
		if len(h.At) == 0 && !p.Published {
			continue // the chart begins where something is known
		}
		length := min(fleet.Minute, now.Sub(p.Minute)).Seconds()
		perSecond := func(n int64) *float64 {
			if !p.Published || length < 1 {
				return nil
			}
			v := round(float64(n) / length)
			return &v
		}
		h.At = append(h.At, p.Minute.Unix())
		h.Granted = append(h.Granted, perSecond(p.Granted+p.Passed)) // as in the columns: see limit.through
		h.Refused = append(h.Refused, perSecond(p.Refused+p.WouldRefuse))
		h.Waited = append(h.Waited, perSecond(p.Waited))
		var rate *float64
		if p.Rate > 0 {
			rate = &p.Rate
		}
		h.Rate = append(h.Rate, rate)
	}
	return h
}

// marks are what concerns a limit.
func marks(events []fleet.Event, name string) []mark {
	all := []mark{}
	for i := range events {
		if e := &events[i]; e.Limit == "" || e.Limit == name {
			all = append(all, mark{e.At.Unix(), string(e.Kind), say(e)})
		}
	}
	return all
}

// say is an event in words.
func say(e *fleet.Event) string {
	who := e.Host
	if who == "" {
		who = e.Instance
	}
	because := ""
	if e.Err != "" {
		because = ": " + e.Err
	}
	switch e.Kind {
	case fleet.LimitAdded:
		return "new: " + e.To
	case fleet.LimitChanged:
		return fmt.Sprintf("changed from %s to %s", e.From, e.To)
	case fleet.LimitRemoved:
		return "removed; it was " + e.From
	case fleet.Penalized:
		return "held back for " + span(e.For)
	case fleet.StoreDown:
		return who + ": the store is away" + because
	case fleet.StoreBack:
		return who + ": the store is back after " + span(e.For)
	case fleet.SwitchOff:
		return "switched off: every call passes" + because
	case fleet.SwitchOn:
		return "switched on" + because
	case fleet.LoadFailed:
		return who + ": the limits cannot be loaded" + because
	case fleet.LoadedAgain:
		return who + ": the limits can be loaded again"
	case fleet.InstanceBegins:
		return who + " has started"
	case fleet.InstanceEnds:
		return who + " has ended"
	}
	return string(e.Kind)
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	text, err := json.Marshal(v)
	if err != nil {
		status, text = http.StatusInternalServerError, []byte(`{"error":"cannot be encoded"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(text, '\n')) // the client may have gone
}

package console

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/figure"
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

// ranges are the times that a chart can show.
var ranges = map[string]time.Duration{"15m": 15 * time.Minute, "1h": time.Hour, "1d": fleet.Day}

// history answers what became of a limit's calls in the last 15 minutes, hour or day.
func (c *Console) history(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), readTimeout)
	defer cancel()
	name, now := r.URL.Query().Get("name"), time.Now()
	back, ok := ranges[r.URL.Query().Get("range")]
	if !ok {
		back = fleet.Day
	}
	points, err := c.config.Source.History(ctx, name, now.Add(-back))
	if err != nil {
		c.refuse(w, r, &refusal{status: http.StatusBadGateway, text: "The history cannot be read: " + err.Error()})
		return
	}
	events, err := c.config.Source.Events(ctx, now.Add(-back))
	if err != nil {
		c.refuse(w, r, &refusal{status: http.StatusBadGateway, text: "What happened cannot be read: " + err.Error()})
		return
	}
	h := columns(points, now)
	h.Marks = marks(events, name)
	writeJSON(w, http.StatusOK, h)
}

// leastOfMinute is how much of the present minute must be over for a rate: instances publish every two seconds.
const leastOfMinute = 10 * time.Second

// columns returns the points of a chart.
func columns(points []fleet.Point, now time.Time) *history {
	h := &history{At: []int64{}, Granted: []*float64{}, Refused: []*float64{}, Waited: []*float64{}, Rate: []*float64{}}
	for i := range points {
		p := &points[i]
		length := min(fleet.Minute, now.Sub(p.Minute)).Seconds()
		// The first minute in which an instance published has only the calls of its last part, and so has the present one its first
		// seconds: as rates they would be a ramp that never was.
		part := i > 0 && !points[i-1].Published || length < leastOfMinute.Seconds()
		if len(h.At) == 0 && (!p.Published || part) {
			continue // the chart begins where something is known
		}
		perSecond := func(n int64) *float64 {
			if !p.Published || part {
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
			all = append(all, mark{e.At.Unix(), title(e.Kind), say(e)})
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
		return "held back for " + figure.Span(e.For) + by(e, " as an upstream asked")
	case fleet.LimitReset:
		return "reset" + by(e, "")
	case fleet.LossConfirmed:
		return "the loss of limits was confirmed" + by(e, "")
	case fleet.StoreDown:
		return who + ": the store is away" + because
	case fleet.StoreBack:
		return who + ": the store is back after " + figure.Span(e.For)
	case fleet.SwitchOff:
		return "switched off: every call passes" + because + by(e, "")
	case fleet.SwitchOn:
		return "switched on" + because + by(e, "")
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

// by returns who did it, and why; otherwise, if it was no person.
func by(e *fleet.Event, otherwise string) string {
	if e.Who == "" {
		return otherwise
	}
	return ", " + author(e)
}

// author returns the person behind an event, and the reason: by ann: they ring.
func author(e *fleet.Event) string {
	text := "by " + figure.Name(e.Who)
	if e.Why != "" {
		text += ": " + figure.Name(e.Why)
	}
	return text
}

// title is a kind of event as a tag.
func title(k fleet.EventKind) string {
	switch k {
	case fleet.LimitAdded, fleet.LimitChanged, fleet.LimitRemoved:
		return "row"
	case fleet.Penalized:
		return "held back"
	case fleet.LimitReset:
		return "reset"
	case fleet.LossConfirmed:
		return "loss confirmed"
	case fleet.StoreDown, fleet.StoreBack:
		return "store"
	case fleet.SwitchOff, fleet.SwitchOn:
		return "switch"
	case fleet.LoadFailed, fleet.LoadedAgain:
		return "load"
	case fleet.InstanceBegins, fleet.InstanceEnds:
		return "instance"
	}
	return strings.ReplaceAll(string(k), "_", " ")
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

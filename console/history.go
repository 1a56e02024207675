package console

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// history is the initial data of a chart, in columns as uPlot takes them. Rates are per second, and null where not known.
type history struct {
	At      []int64    `json:"at"` // seconds since 1970
	Granted []*float64 `json:"granted"`
	Refused []*float64 `json:"refused"`
	Waited  []*float64 `json:"waited"`
	Rate    []*float64 `json:"rate"`
	Marks   []mark     `json:"marks"`
}

// mark is an event on the chart.
type mark struct {
	At   int64  `json:"at"` // seconds since 1970
	Kind string `json:"kind"`
	Text string `json:"text"`
}

// firstRange is the period of a chart at first.
const firstRange = "15m"

// ranges are the periods that a chart can show.
var ranges = map[string]time.Duration{"15m": 15 * time.Minute, "1h": time.Hour, "1d": fleet.Day}

// history serves the outcome of a limit's calls in the last 15 minutes, hour or day.
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

// leastOfMinute is how much of the present minute must have passed before its rate is shown. Instances publish every two
// seconds.
const leastOfMinute = 10 * time.Second

// columns converts the history for a chart.
func columns(points []fleet.Point, now time.Time) *history {
	h := &history{At: []int64{}, Granted: []*float64{}, Refused: []*float64{}, Waited: []*float64{}, Rate: []*float64{}}
	for i := range points {
		p := &points[i]
		length := min(fleet.Minute, now.Sub(p.Minute)).Seconds()
		// The first published minute has only the calls of its last part, and the present one only those of its first
		// seconds. As rates they would show a ramp that never was.
		part := i > 0 && !points[i-1].Published || length < leastOfMinute.Seconds()
		if len(h.At) == 0 && (!p.Published || part) {
			continue // the chart begins with the first known minute
		}
		perSecond := func(n int64) *float64 {
			if !p.Published || part {
				return nil
			}
			v := round(float64(n) / length)
			return &v
		}
		h.At = append(h.At, p.Minute.Unix())
		h.Granted = append(h.Granted, perSecond(p.Granted+p.Passed)) // as in the columns: see limit.granted
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

// recentMarks returns the events of the chart's first period, the newest first, or why they are not known.
func (c *Console) recentMarks(ctx context.Context, name string) (all []mark, unknown string) {
	ctx, cancel := context.WithTimeout(ctx, pageTimeout)
	defer cancel()
	events, err := c.config.Source.Events(ctx, time.Now().Add(-ranges[firstRange]))
	if err != nil {
		return nil, eventsLost(err)
	}
	all = marks(events, name)
	slices.Reverse(all)
	return all, ""
}

// marks returns the events that concern a limit.
func marks(events []fleet.Event, name string) []mark {
	all := []mark{}
	for i := range events {
		if e := &events[i]; e.Limit == "" || e.Limit == name {
			all = append(all, mark{e.At.Unix(), title(e.Kind), eventText(e)})
		}
	}
	return all
}

// eventText describes an event.
func eventText(e *fleet.Event) string {
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
		return who + ": an outage of the store began" + because
	case fleet.StoreBack:
		return who + ": the outage of the store ended after " + figure.Span(e.For)
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

// by returns who did it and why, or otherwise if no person did.
func by(e *fleet.Event, otherwise string) string {
	if e.Who == "" {
		return otherwise
	}
	return ", " + author(e)
}

// author returns the person behind an event, and the reason: "by ann: too many calls".
func author(e *fleet.Event) string {
	text := "by " + figure.Name(e.Who)
	if e.Why != "" {
		text += ": " + figure.Name(e.Why)
	}
	return text
}

// title returns the tag of a kind of event.
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

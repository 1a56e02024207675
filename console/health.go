package console

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// healthData is the data of the page Health, for a template and as JSON.
type healthData struct {
	At        time.Time        `json:"at"`
	Problems  []problem        `json:"problems"`
	Instances []instanceHealth `json:"instances"`
	Rejected  []fleet.Rejected `json:"rejected"`
	Skipped   []string         `json:"skipped"`
	Events    []mark           `json:"events"`
	NoEvents  string           `json:"no_events"` // why Events is empty; empty if nothing happened
	Switch    string           `json:"switch"`
	Off       bool             `json:"off"`
}

// instanceHealth describes an instance in words.
type instanceHealth struct {
	Name    string    `json:"name"`
	Version string    `json:"version"`
	Started time.Time `json:"started"`
	Beat    time.Time `json:"beat"`
	Granted float64   `json:"granted"`
	Refused float64   `json:"refused"`
	Limits  int       `json:"limits"`
	Loads   string    `json:"loads"`
	Store   string    `json:"store"`
	Missed  string    `json:"missed"`
	Problem string    `json:"problem"`
	Ended   bool      `json:"ended"`
}

const mostEvents = 100

func (c *Console) readHealth(ctx context.Context, v *view) *healthData {
	h := &healthData{At: v.at, Problems: v.problems(), Instances: []instanceHealth{}, Rejected: []fleet.Rejected{}, Skipped: []string{}, Events: []mark{}}
	for _, r := range v.rejected {
		r.Want = formWant(r.Want)
		h.Rejected = append(h.Rejected, r)
	}
	h.Skipped = append(h.Skipped, v.skipped...)
	for i := range v.instances {
		h.Instances = append(h.Instances, v.health(&v.instances[i]))
	}
	switch {
	case v.sw == nil && v.living() == 0:
		h.Switch, h.Off = v.unknownSwitch()
	case v.sw == nil:
		h.Switch = "No switch is configured: limits always apply."
	case v.sw.Off:
		h.Off = true
		h.Switch = "Off for " + figure.Span(v.at.Sub(v.sw.Since).Truncate(time.Second)) + v.switchedOffBy() + ": every call passes."
	default:
		h.Switch = "On: limits apply."
	}
	events, err := c.config.Source.Events(ctx, v.at.Add(-fleet.Day))
	if err != nil {
		h.NoEvents = eventsLost(err)
		h.Problems = append(h.Problems, problem{Text: h.NoEvents})
	}
	for i := len(events) - 1; i >= 0 && len(h.Events) < mostEvents; i-- {
		text := eventText(&events[i])
		if events[i].Limit != "" {
			text = figure.Name(events[i].Limit) + ": " + text
		}
		h.Events = append(h.Events, mark{events[i].At.Unix(), title(events[i].Kind), text})
	}
	return h
}

// eventsLost describes that events cannot be read. A page then does not show that there are none.
func eventsLost(err error) string { return "What happened cannot be read: " + err.Error() }

// unknownSwitch describes the switch while no instance reports: as the last report had it.
func (v *view) unknownSwitch() (text string, off bool) {
	last := v.lastSwitch
	if last == nil {
		return "Not known: no instance reports.", false
	}
	state := "on"
	if last.Switch.Off {
		state = "off"
	}
	return "Not known: no instance reports. It was " + state + " in the last report, " + figure.Span(v.at.Sub(last.Beat).Truncate(time.Second)) + " ago.", last.Switch.Off
}

func (v *view) health(i *instance) instanceHealth {
	now := v.at
	h := instanceHealth{
		Name: i.title(), Version: i.Version, Started: i.Started, Beat: i.Beat, Granted: round(i.granted), Refused: round(i.refused),
		Limits: len(i.Limits) + i.MoreLimits, Problem: v.trouble(i), Ended: i.Ended || v.replaced[i.ID],
	}
	h.Loads = count(i.Loads.Tried, "load", "loads")
	if i.Loads.Failed > 0 {
		h.Loads += ", " + count(i.Loads.Failed, "failed", "failed")
	}
	if !i.Loads.Last.IsZero() {
		h.Loads += ", the last good one " + figure.Span(now.Sub(i.Loads.Last).Truncate(time.Second)) + " ago"
	}
	if i.Loads.Held > 0 {
		h.Loads += "; " + count(i.Loads.Held, "limit is held though its row is gone", "limits are held though their rows are gone")
	}
	if i.MoreLimits > 0 {
		h.Loads += "; " + count(i.MoreLimits, "limit is", "limits are") + " not shown: an instance reports at most " + figure.Count(fleet.MostLimits)
	}
	if i.Crowded {
		h.Loads += "; new limits share one counter, because too many names came and went since the instance started; a restart gives them counters of their own"
	}
	switch {
	case i.Store.Down:
		h.Store = "unavailable: " + i.Store.Err
	case i.Store.Outages > 0:
		h.Store = "replies; " + count(i.Store.Outages, "outage", "outages") + " of " + figure.Span(i.Store.Away) + " in all"
	default:
		h.Store = "replies"
	}
	if i.Store.Kind != "" {
		h.Store = i.Store.Kind + ": " + h.Store
	}
	if i.Missed.Beats > 0 {
		h.Missed = count(int(i.Missed.Beats), "report", "reports") + " could not be published: " + i.Missed.Err
	}
	return h
}

func (c *Console) healthPage(w http.ResponseWriter, r *http.Request) {
	p := c.page(r, "health", "Health")
	if v := c.look(r, p); v != nil {
		ctx, cancel := context.WithTimeout(r.Context(), pageTimeout)
		defer cancel()
		h := c.readHealth(ctx, v)
		p.Problems, p.Data = h.Problems, h
	}
	c.render(w, r, http.StatusOK, p)
}

// healthFrame returns the same data for the stream.
func (c *Console) healthFrame(ctx context.Context) []byte {
	v, err := c.board.now(ctx)
	if err != nil {
		return c.lost(err)
	}
	return event("health", must(json.Marshal(c.readHealth(ctx, v))))
}

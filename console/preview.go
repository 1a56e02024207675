package console

import (
	"context"
	"encoding/json"
	"errors"
	"math"
	"net/http"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/console/preview"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// previewReply describes the effect of a row, in words.
type previewReply struct {
	Now   string   `json:"now"` // the effect of the row as it is
	Text  string   `json:"text"`
	Notes []string `json:"notes"`
	Error string   `json:"error,omitempty"` // in a value, which may be incomplete while it is typed
}

// nearlyDay is how much of the last day the history must cover for the text to speak of the last day.
const nearlyDay = 23 * time.Hour

// servePreview describes the effect of a row with these values on the traffic of the last day. It changes nothing.
func (c *Console) servePreview(w http.ResponseWriter, r *http.Request) {
	if c.config.Editor == nil {
		c.refuse(w, r, errNoEditor)
		return
	}
	name := r.URL.Query().Get("name")
	var values editor.Values
	if err := json.Unmarshal([]byte(r.URL.Query().Get("values")), &values); err != nil || name == "" || len(name) > maxName {
		c.refuse(w, r, &refusal{status: http.StatusBadRequest, text: "A preview wants a name, and values as a JSON object."})
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), readTimeout)
	defer cancel()
	points, err := c.config.Source.History(ctx, name, time.Now().Add(-fleet.Day))
	if err != nil {
		c.refuse(w, r, &refusal{status: http.StatusBadGateway, text: "The history cannot be read: " + err.Error()})
		return
	}
	events, err := c.config.Source.Events(ctx, time.Now().Add(-fleet.Day))
	if err != nil {
		c.refuse(w, r, &refusal{status: http.StatusBadGateway, text: "What happened cannot be read: " + err.Error()})
		return
	}
	in := preview.Input{Minutes: minutes(points)}
	if len(in.Minutes) > int(nearlyDay/fleet.Minute) {
		in.Period = "the last day's traffic"
	}
	var reply previewReply
	switch row, err := c.config.Editor.Get(ctx, name); {
	case err != nil:
	case row.Bad != nil:
		reply.Now = "The row is rejected: " + c.wrong(row.Bad) + "."
	default:
		in.Before, in.BeforeMinutes = &row.Limit, underLimit(points, lastChange(events, name), &row.Limit)
	}
	wanted, err := c.config.Editor.Limit(name, values)
	in.Limit = wanted
	result := preview.Of(in)
	if in.Before != nil {
		reply.Now = result.Before
	}
	if err != nil {
		reply.Error = c.wrong(err)
	} else {
		reply.Text, reply.Notes = result.Text, append([]string{}, result.Notes...)
	}
	writeJSON(w, http.StatusOK, reply)
}

// noValue is the Value of an error about a column that is NULL.
const noValue = "NULL"

// wrong returns the error in a row for people: with the field's label, and in the unit of the form.
func (c *Console) wrong(err error) string {
	var row *registry.RowError
	if !errors.As(err, &row) || row.Field == "" {
		return err.Error()
	}
	f := c.fieldOf(row.Field)
	if row.Value == noValue {
		return f.Label + " has no value: want " + formWant(row.Want)
	}
	return f.Label + " " + f.inWords(&row.Value) + ": want " + formWant(row.Want)
}

// minutes returns the minutes in which an instance published, without the last one, which is incomplete.
func minutes(points []fleet.Point) (all []preview.Point) {
	for i := range points[:max(0, len(points)-1)] {
		if p := &points[i]; p.Published {
			all = append(all, preview.Point{Granted: p.Granted + p.Passed + p.WouldRefuse, Refused: p.Refused, Waited: p.Waited})
		}
	}
	return all
}

// lastChange returns when the limit or the switch was changed last; zero if the events have neither.
func lastChange(events []fleet.Event, name string) (at time.Time) {
	for i := range events {
		switch e := &events[i]; e.Kind {
		case fleet.LimitAdded, fleet.LimitChanged, fleet.LimitRemoved:
			if e.Limit == name {
				at = e.At
			}
		case fleet.SwitchOff, fleet.SwitchOn:
			at = e.At
		}
	}
	return at
}

// underLimit returns the minutes in which this limit was in force, as far as the history shows: those after the last change,
// with the limit's rate or an unknown one. What a shadow limit would have refused counts as refused.
func underLimit(points []fleet.Point, since time.Time, l *registry.Limit) (all []preview.Point) {
	for i := range points[:max(0, len(points)-1)] {
		p := &points[i]
		other := p.Rate > 0 && !l.NoRate && math.Abs(p.Rate-l.Rate) > 1e-6*l.Rate
		if p.Published && !p.Minute.Before(since) && !other {
			all = append(all, preview.Point{Granted: p.Granted + p.Passed, Refused: p.Refused + p.WouldRefuse, Waited: p.Waited})
		}
	}
	return all
}

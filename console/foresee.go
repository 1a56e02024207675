package console

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/console/preview"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// foreseen is what a row would mean, in words.
type foreseen struct {
	Text  string   `json:"text"`
	Notes []string `json:"notes"`
	Error string   `json:"error,omitempty"` // of a value that no row may have: it is perhaps half written
}

// foresee answers what a row with these values would mean for the traffic of the last day. It changes nothing.
func (c *Console) foresee(w http.ResponseWriter, r *http.Request) {
	if c.config.Editor == nil {
		c.refuse(w, r, errNoEditor)
		return
	}
	name := r.URL.Query().Get("name")
	var values sqlsource.Values
	if err := json.Unmarshal([]byte(r.URL.Query().Get("values")), &values); err != nil || name == "" || len(name) > maxName {
		c.refuse(w, r, &refusal{http.StatusBadRequest, "A preview wants a name, and values as a JSON object."})
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), readTimeout)
	defer cancel()
	names := c.config.Editor.Columns()
	wanted, err := meaning(values, names)
	if err != nil {
		writeJSON(w, http.StatusOK, foreseen{Error: err.Error()})
		return
	}
	in := preview.Input{Limit: wanted, Period: "the last day's traffic"}
	if row, err := c.config.Editor.Get(ctx, name); err == nil {
		if before, err := meaning(row.Values, names); err == nil {
			in.Before = &before
		}
	}
	points, err := c.config.Source.History(ctx, name, time.Now().Add(-fleet.Day))
	if err != nil {
		c.refuse(w, r, &refusal{http.StatusBadGateway, "The history cannot be read: " + err.Error()})
		return
	}
	in.Minutes = minutes(points)
	result := preview.Of(in)
	writeJSON(w, http.StatusOK, foreseen{Text: result.Text, Notes: append([]string{}, result.Notes...)})
}

// minutes are those in which an instance has told of itself. The last one is not over.
func minutes(points []fleet.Point) (all []preview.Point) {
	for i := range points[:max(0, len(points)-1)] {
		if p := &points[i]; p.Published {
			all = append(all, preview.Point{Granted: p.Granted + p.Passed + p.WouldRefuse, Refused: p.Refused, Waited: p.Waited})
		}
	}
	return all
}

// meaning is what values of a row mean. The editor says whether the row is accepted when it is saved.
func meaning(values sqlsource.Values, names sqlsource.Columns) (l preview.Limit, err error) {
	number := func(column string, otherwise float64) float64 {
		v := values[column]
		if column == "" || v == nil || strings.TrimSpace(*v) == "" {
			return otherwise
		}
		f, e := strconv.ParseFloat(strings.TrimSpace(*v), 64)
		if (e != nil || math.IsNaN(f) || math.IsInf(f, 0) || f < 0) && err == nil {
			err = fmt.Errorf("%s %.40q: want a number that is not negative", column, *v)
		}
		return f
	}
	truth := func(column string) bool {
		v := values[column]
		return v != nil && (*v == "1" || *v == "true")
	}
	l.Rate = number(names.Rate, 0)
	l.MaxWait = time.Duration(number(names.Cache, 0.5) * float64(time.Second))
	l.Off = names.Status != "" && values[names.Status] != nil && !truth(names.Status)
	l.Quota, l.Shadow, l.PerKey = truth(names.Quota), truth(names.Shadow), truth(names.PerKey)
	l.Warmup = time.Duration(number(names.WarmupMillis, 0) * float64(time.Millisecond))
	l.ColdFactor = number(names.ColdFactor, 0)
	l.Concurrent = int(min(number(names.Concurrent, 0), math.MaxInt32))
	l.Window = time.Duration(number(names.Window, 0) * float64(time.Second))
	l.WindowLimit = int(min(number(names.WindowLimit, 0), math.MaxInt32))
	l.NoRate = values[names.Rate] == nil && (l.Window > 0 || l.Concurrent > 0)
	if burst := number(names.Burst, -1); burst >= 0 && err == nil {
		l.Burst = &burst
	}
	return l, err
}

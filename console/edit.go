package console

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// Editor changes rows of the table of limits: a *sqlsource.Editor.
type Editor interface {
	Columns() sqlsource.Columns
	Get(ctx context.Context, name string) (sqlsource.Row, error)
	Change(ctx context.Context, c sqlsource.Change) (sqlsource.AuditEntry, error)
	SetShadow(ctx context.Context, name string, from sqlsource.Version, on bool, who, why string) (sqlsource.AuditEntry, error)
	Undo(ctx context.Context, id int64, who, why string) (sqlsource.AuditEntry, error)
	Act(ctx context.Context, a sqlsource.Action, do func(context.Context) error) (sqlsource.AuditEntry, error)
	History(ctx context.Context, name string, limit int) ([]sqlsource.AuditEntry, error)
}

// editable tells whether anything can be changed, by whoever may.
func (c *Console) editable() bool {
	return c.config.Editor != nil || c.config.Penalize != nil || c.config.Reset != nil || c.config.Turn != nil
}

const (
	mostEntries = 200 // of the audit on a page
	editTimeout = 5 * time.Second
)

// rowData is the screen Change.
type rowData struct {
	There   bool // there is a row; else one may be added
	Version sqlsource.Version
	ID, Bad string
	Fields  []editField
	Shadow  string // on, off, or "" if the table has no column for it
	Entries []entryData
	Problem string
}

// editField is a column that may be changed.
type editField struct {
	Column, Label, Hint string
	Value               string
	Null                bool
}

// entryData is a line of the audit.
type entryData struct {
	ID       int64
	At       time.Time
	Who, Why string
	Name     string
	What     []string
	UndoneBy int64
	Final    bool // it cannot be undone
}

// labels say what the columns mean, by the field of sqlsource.Columns.
type label struct{ text, hint string }

// labels are what people call the columns, by name.
func labels(c sqlsource.Columns) map[string]label {
	all := map[string]label{
		c.Rate:         {"Rate", "permits per second; 0: nothing passes"},
		c.Cache:        {"Longest wait", "share of a second that a call may wait: 0.5 is 500 ms; empty: 0.5"},
		c.Status:       {"Status", "1: the limit is on; 0: every call passes"},
		c.Burst:        {"Saves up", "permits; empty: one second's worth"},
		c.WarmupMillis: {"Warm-up", "milliseconds; empty: none"},
		c.ColdFactor:   {"Cold factor", "above 1; empty: 3"},
		c.Quota:        {"Quota", "1: counted in any sliding second, nothing is saved up"},
		c.Shadow:       {"Shadow", "1: only tried, nobody is refused"},
		c.PerKey:       {"Each key by itself", "1: each key has a bucket of its own"},
		c.Window:       {"Window", "its length in seconds; empty: none"},
		c.WindowLimit:  {"Calls in a window", "that may begin in any such window"},
		c.Concurrent:   {"At once", "calls that may be under way; empty: any number"},
	}
	delete(all, "")
	return all
}

// fields are the columns that may be changed, in the order of the table.
func (c *Console) fields(columns []string, values sqlsource.Values) []editField {
	known := labels(c.config.Editor.Columns())
	var all []editField
	for _, column := range columns {
		f := editField{Column: column, Label: known[column].text, Hint: known[column].hint, Null: values[column] == nil}
		if f.Label == "" {
			f.Label = column
		}
		if v := values[column]; v != nil {
			f.Value = *v
		}
		all = append(all, f)
	}
	return all
}

// newRow are the columns of a row that is yet to be.
func (c *Console) newRow() []string {
	names := c.config.Editor.Columns()
	all := []string{names.Rate, names.Cache, names.Status, names.Burst, names.WarmupMillis, names.ColdFactor, names.Quota, names.Shadow, names.PerKey,
		names.Window, names.WindowLimit, names.Concurrent}
	return slices.DeleteFunc(all, func(s string) bool { return s == "" })
}

func (c *Console) changePage(w http.ResponseWriter, r *http.Request) {
	name := r.URL.Query().Get("name")
	switch {
	case c.config.Editor == nil:
		c.refuse(w, r, errNoEditor)
		return
	case name == "" || len(name) > maxName:
		c.refuse(w, r, errName)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), editTimeout)
	defer cancel()
	p := c.page(r, "change", name)
	p.Name = name
	d := &rowData{}
	row, err := c.config.Editor.Get(ctx, name)
	switch {
	case err == nil:
		d.There, d.Version, d.ID, d.Fields = true, row.Version, row.ID, c.fields(row.Editable, row.Values)
		if row.Bad != nil {
			d.Bad = row.Bad.Error()
		}
		d.Shadow = c.shadowOf(&row)
	case errors.Is(err, sqlsource.ErrNoRow):
		d.Fields = c.fields(c.newRow(), nil)
	default:
		d.Problem = err.Error()
	}
	if entries, err := c.config.Editor.History(ctx, name, mostEntries); err == nil {
		d.Entries = list(entries)
	} else if d.Problem == "" {
		d.Problem = "What was changed cannot be read: " + err.Error()
	}
	p.Data = d
	c.render(w, r, http.StatusOK, p)
}

func (c *Console) shadowOf(row *sqlsource.Row) string {
	column := c.config.Editor.Columns().Shadow
	if !slices.Contains(row.Editable, column) {
		return ""
	}
	if v := row.Values[column]; v != nil && (*v == "1" || *v == "true") {
		return "on"
	}
	return "off"
}

// list are entries of the audit for people.
func list(entries []sqlsource.AuditEntry) []entryData {
	var all []entryData
	for i := range entries {
		a := &entries[i]
		e := entryData{ID: a.ID, At: a.At, Who: a.Who, Why: a.Why, Name: a.Name, UndoneBy: a.UndoneBy, Final: a.Action != ""}
		switch {
		case e.Final:
			e.What = []string{a.Action}
		case a.From == nil:
			e.What = []string{"added"}
		case a.To == nil:
			e.What = []string{"removed"}
		}
		if a.To != nil {
			for _, column := range a.Changed() {
				if a.From != nil || a.To[column] != nil {
					e.What = append(e.What, column+": "+plain(a.From[column])+" → "+plain(a.To[column]))
				}
			}
		}
		all = append(all, e)
	}
	return all
}

func plain(v *string) string {
	if v == nil {
		return "–"
	}
	return *v
}

// changesPage is the audit of all rows.
func (c *Console) changesPage(w http.ResponseWriter, r *http.Request) {
	if c.config.Editor == nil {
		c.refuse(w, r, errNoEditor)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), editTimeout)
	defer cancel()
	p := c.page(r, "changes", "Changes")
	d := &rowData{}
	entries, err := c.config.Editor.History(ctx, "", mostEntries)
	if err != nil {
		d.Problem = "What was changed cannot be read: " + err.Error()
	}
	d.Entries = list(entries)
	p.Data = d
	c.render(w, r, http.StatusOK, p)
}

var errNoEditor = &refusal{http.StatusNotFound, "Rows cannot be changed here: the console was given no database, or nobody may."}

// said is an error of an Editor as people read it, and its status.
func said(err error) error {
	var conflict *sqlsource.ConflictError
	var row *registry.RowError
	var column *sqlsource.ColumnError
	var right *sqlsource.RightError
	var why *refusal
	switch {
	case errors.As(err, &why):
		return why
	case errors.As(err, &conflict):
		return &refusal{http.StatusConflict, "Somebody has changed it meanwhile: nothing was written. Look at what it says now, and try again."}
	case errors.As(err, &row):
		return &refusal{http.StatusUnprocessableEntity, fmt.Sprintf("%s %s: want %s", row.Field, row.Value, row.Want)}
	case errors.As(err, &column), errors.Is(err, sqlsource.ErrUndone), errors.Is(err, sqlsource.ErrAction), errors.Is(err, sqlsource.ErrNoEntry), errors.Is(err, sqlsource.ErrNoRow), errors.Is(err, sqlsource.ErrNoAudit):
		return &refusal{http.StatusUnprocessableEntity, err.Error()}
	case errors.As(err, &right):
		return &refusal{http.StatusForbidden, err.Error()}
	}
	return &refusal{http.StatusBadGateway, err.Error()}
}

package console

import (
	"cmp"
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// Editor changes rows of the table of limits: a *editor.Editor.
type Editor interface {
	Columns() sqlsource.Columns
	Get(ctx context.Context, name string) (editor.Row, error)
	Limit(name string, values editor.Values) (registry.Limit, error)
	Change(ctx context.Context, c editor.Change) (editor.AuditEntry, error)
	Undo(ctx context.Context, id int64, who, why string) (editor.AuditEntry, error)
	Act(ctx context.Context, a editor.Action, do func(context.Context) error) (editor.AuditEntry, error)
	History(ctx context.Context, name string, limit int) ([]editor.AuditEntry, error)
}

// editable reports whether the console is configured to change anything at all.
func (c *Console) editable() bool {
	return c.config.Editor != nil || c.config.Penalize != nil || c.config.Reset != nil || c.config.Turn != nil || c.config.Confirm != nil
}

const (
	mostEntries = 200 // in the audit shown on a page
	editTimeout = 5 * time.Second
)

// rowData is the data of the page Change.
type rowData struct {
	There   bool // the row exists; otherwise it can be added
	Version editor.Version
	ID, Bad string
	Means   string // the row in words
	Fields  []editField
	Shadow  string // on, off, or "" if the table has no column for it
	Entries []entryData
	All     bool   // Entries reaches back to the first change
	Filter  string // on the entries
	Most    int    // number of entries searched
	Problem string
}

// editField is a field of the form.
type editField struct {
	Column, Label, Hint, Unit, Empty string
	Scale                            float64
	Value                            string // as it is entered
	Was                              string // as stored in the column
	Null, Flag, Checked              bool
	Options                          []option // of a select; empty for other fields
}

// option is a choice in a select.
type option struct {
	registry.Choice
	Chosen bool
}

// entryData is a line of the audit.
type entryData struct {
	ID       int64
	At       time.Time
	Who, Why string
	Name     string
	Link     bool   // Name is a limit; otherwise Of is the entry's subject
	Of       string // switch, or another table
	What     []string
	UndoneBy int64
	Final    bool   // it cannot be undone
	Turns    string // the state, on or off, in which an undo leaves the fleet's switch; empty for a row
}

// form returns the editable fields. The flags of a valid row show their effective value, also where the column is NULL.
func (c *Console) form(columns []string, row *editor.Row) []editField {
	var all []editField
	place := map[string]int{}
	for i, f := range fields(c.config.Editor.Columns()) {
		place[f.column] = i - 1000 // unknown columns come last
	}
	for _, column := range slices.SortedStableFunc(slices.Values(columns), func(a, b string) int { return cmp.Compare(place[a], place[b]) }) {
		f, v := c.fieldOf(column), row.Values[column]
		e := editField{Column: column, Label: f.Label, Hint: f.Hint, Unit: f.Unit, Empty: f.Empty, Scale: f.Scale, Value: f.entered(v), Null: v == nil, Options: f.options(v)}
		if v != nil {
			e.Was = *v
		}
		yes, known := truth(v)
		if e.Flag = f.flag && known; e.Flag {
			e.Checked = yes
			if row.Bad == nil {
				e.Checked, _ = f.Flag(&row.Limit)
			}
		}
		all = append(all, e)
	}
	return all
}

// newRow returns the columns of a row that is to be added.
func (c *Console) newRow() (columns []string) {
	for _, f := range fields(c.config.Editor.Columns()) {
		columns = append(columns, f.column)
	}
	return columns
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
	p := c.page(r, "change", "Change "+figure.Name(name))
	p.Name = name
	c.look(r, p)
	d := &rowData{Most: mostEntries}
	row, err := c.config.Editor.Get(ctx, name)
	switch {
	case err == nil:
		d.There, d.Version, d.ID, d.Fields = true, row.Version, row.ID, c.form(row.Editable, &row)
		if row.Bad != nil {
			d.Bad = c.wrong(row.Bad)
		}
		d.Means = c.words(name, row.Values)
		d.Shadow = c.shadowOf(&row)
	case errors.Is(err, editor.ErrNoRow):
		d.Fields = c.form(c.newRow(), &editor.Row{})
	default:
		d.Problem = err.Error()
	}
	if entries, err := c.config.Editor.History(ctx, name, mostEntries); err == nil {
		d.Entries = c.list(entries)
	} else if d.Problem == "" {
		d.Problem = "What was changed cannot be read: " + err.Error()
	}
	p.Data = d
	c.render(w, r, http.StatusOK, p)
}

func (c *Console) shadowOf(row *editor.Row) string {
	column := c.config.Editor.Columns().Shadow
	if !slices.Contains(row.Editable, column) {
		return ""
	}
	if yes, _ := truth(row.Values[column]); yes {
		return "on"
	}
	return "off"
}

// list converts audit entries for the page.
func (c *Console) list(entries []editor.AuditEntry) []entryData {
	var all []entryData
	for i := range entries {
		a := &entries[i]
		e := entryData{ID: a.ID, At: a.At, Who: a.Who, Why: a.Why, Name: a.Name, UndoneBy: a.UndoneBy, Final: a.Action != ""}
		e.Link, e.Of = c.names(a)
		if on, known := c.switchAfter(a, a.From); known {
			e.Turns = map[bool]string{true: "on", false: "off"}[on]
		}
		switch {
		case e.Final:
			e.What = []string{a.Action}
		case a.From == nil && !e.Link:
			e.What = append([]string{"added"}, c.differences(nil, a.To)...)
		case a.To == nil && !e.Link:
			e.What = append([]string{"removed"}, c.differences(a.From, nil)...)
		case a.From == nil:
			e.What = []string{"added: " + c.words(a.Name, a.To)}
		case a.To == nil:
			e.What = []string{"removed; it was " + c.words(a.Name, a.From)}
		default:
			e.What = c.differences(a.From, a.To)
		}
		all = append(all, e)
	}
	return all
}

// names reports whether an entry is about a limit of this table. If not, it returns the entry's subject, because tables can
// share an audit.
func (c *Console) names(a *editor.AuditEntry) (limit bool, of string) {
	values := a.To
	if values == nil {
		values = a.From
	}
	for column := range values {
		limit = limit || c.fieldOf(column).setting == "rate"
	}
	_, isSwitch := values["enabled"]
	switch {
	case a.Name != "" && (limit || a.Action != ""):
		return true, ""
	case isSwitch:
		return false, "switch"
	}
	return false, a.Table
}

// switchAfter returns the state of the switch with the given row of an entry. known is false if the entry is not of a switch.
// Without a row the switch is on.
func (c *Console) switchAfter(a *editor.AuditEntry, row editor.Values) (on, known bool) {
	if _, of := c.names(a); of != "switch" || a.Action != "" {
		return false, false
	}
	value := row["enabled"]
	if value == nil {
		return true, true
	}
	on, ok := registry.ParseFlag(*value)
	return on || !ok, true
}

// words describes a row of these values.
func (c *Console) words(name string, values editor.Values) string {
	l, err := c.config.Editor.Limit(name, values)
	if err != nil {
		return "a row that is rejected, " + c.wrong(err)
	}
	return l.String()
}

// has reports whether an entry contains all words of a filter. A word that begins with a slash is a part of a name, a person
// or a reason, and not of a rate such as 5/s.
func (e *entryData) has(filter string) bool {
	about := strings.ToLower(strings.Join([]string{e.Of, e.Name, e.Who, e.Why}, "\n"))
	what := strings.ToLower(strings.Join(e.What, "\n"))
	for _, word := range strings.Fields(strings.ToLower(filter)) {
		if !strings.Contains(about, word) && (len(word) > 1 && word[0] == '/' || !strings.Contains(what, word)) {
			return false
		}
	}
	return true
}

// changesPage serves the audit of all rows.
func (c *Console) changesPage(w http.ResponseWriter, r *http.Request) {
	if c.config.Editor == nil {
		c.refuse(w, r, errNoEditor)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), editTimeout)
	defer cancel()
	p := c.page(r, "changes", "Changes")
	c.look(r, p)
	d := &rowData{Most: mostEntries}
	entries, err := c.config.Editor.History(ctx, "", mostEntries)
	if err != nil {
		d.Problem = "What was changed cannot be read: " + err.Error()
	}
	d.Filter = r.URL.Query().Get("q")
	d.Entries = slices.DeleteFunc(c.list(entries), func(e entryData) bool { return !e.has(d.Filter) })
	d.All = len(entries) < mostEntries
	p.Data = d
	c.render(w, r, http.StatusOK, p)
}

var errNoEditor = &refusal{status: http.StatusNotFound, text: "Rows cannot be changed here: this console has no database, or no user with the right to write."}

// refusalOf converts an error of an Editor into a message for people and an HTTP status.
func (c *Console) refusalOf(err error) error {
	var conflict *editor.ConflictError
	var row *registry.RowError
	var column *editor.ColumnError
	var right *sqlsource.RightError
	var why *refusal
	switch {
	case errors.As(err, &why):
		return why
	case errors.As(err, &conflict):
		return &refusal{status: http.StatusConflict, text: "The row was changed meanwhile. Nothing was written."}
	case errors.As(err, &row):
		return &refusal{status: http.StatusUnprocessableEntity, text: c.wrong(row)}
	case errors.As(err, &column), errors.Is(err, editor.ErrUndone), errors.Is(err, editor.ErrAction), errors.Is(err, editor.ErrNoEntry), errors.Is(err, editor.ErrNoRow), errors.Is(err, editor.ErrNoAudit):
		return &refusal{status: http.StatusUnprocessableEntity, text: err.Error()}
	case errors.As(err, &right):
		return &refusal{status: http.StatusForbidden, text: err.Error()}
	}
	return &refusal{status: http.StatusBadGateway, text: err.Error()}
}

package console

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// changeRequest is the body of a request that changes something.
type changeRequest struct {
	Name    string             `json:"name"`
	From    editor.Version     `json:"from"`
	Values  map[string]*string `json:"values"` // null for SQL NULL
	Was     map[string]*string `json:"was"`    // the values that the page showed, to explain a conflict
	Why     string             `json:"why"`
	ID      int64              `json:"id"`
	On      *bool              `json:"on"` // of the switch or of a row's shadow; nil if it was not sent
	Seconds float64            `json:"seconds"`
}

const (
	maxChangeRequest = 64 << 10
	maxPenalty       = time.Hour
)

// actions returns the functions behind /api/…. Each makes one kind of change and returns a sentence that describes it.
func (c *Console) actions() map[string]func(context.Context, principal, *changeRequest) (string, error) {
	return map[string]func(context.Context, principal, *changeRequest) (string, error){
		"save": c.save, "remove": c.remove, "shadow": c.shadow, "undo": c.undo, "switch": c.turn, "penalize": c.penalize, "reset": c.reset, "confirm": c.confirm,
	}
}

// act returns the handler of one action. The user must be allowed to write, and the request must come from a page of this
// console.
func (c *Console) act(what string, do func(context.Context, principal, *changeRequest) (string, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		user := principalOf(r)
		o, err := c.read(w, r)
		if err != nil {
			c.logRefusedWrite(r, what, user, err)
			c.refuse(w, r, err)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), editTimeout)
		defer cancel()
		done, err := do(ctx, user, o)
		if err != nil {
			c.config.Log.Warn("console: change refused", "what", what, "who", user.name, "limit", o.Name, "error", err)
			c.refuse(w, r, err)
			return
		}
		c.config.Log.Info("console: changed", "what", what, "who", user.name, "limit", o.Name, "why", o.Why, "done", done)
		writeJSON(w, http.StatusOK, map[string]string{"done": done})
	}
}

// read checks that the request may change something, and decodes its body.
func (c *Console) read(w http.ResponseWriter, r *http.Request) (*changeRequest, error) {
	if err := c.auth.mayWrite(principalOf(r), r); err != nil {
		return nil, err
	}
	if kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";"); kind != "application/json" {
		return nil, &refusal{status: http.StatusUnsupportedMediaType, text: "Changes are sent as application/json."}
	}
	o := new(changeRequest)
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxChangeRequest))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(o); err != nil {
		return nil, &refusal{status: http.StatusBadRequest, text: "What was sent cannot be read: " + err.Error()}
	}
	if len(o.Name) > maxName {
		return nil, errName
	}
	return o, nil
}

// missing returns the refusal of a request without a field that it needs.
func missing(field, text string) *refusal {
	return &refusal{status: http.StatusUnprocessableEntity, field: field, text: text}
}

// errOn refuses a request that does not name the state it asks for: off is never a default.
var errOn = missing("on", `The field "on" is missing: true or false is needed.`)

// PenalizeIn returns a function for Config.Penalize that holds buckets of a registry back. It fails if calls do not use such
// a bucket now. The registry needs the same options as those of the gateways.
func PenalizeIn(limits *registry.Registry) func(ctx context.Context, name string, d time.Duration) error {
	return func(ctx context.Context, name string, d time.Duration) error {
		if err := used(limits, name); err != nil {
			return err
		}
		return limits.Penalize(ctx, name, d)
	}
}

// used returns a refusal if calls do not use a bucket of that name.
func used(limits *registry.Registry, name string) error {
	if by, _ := limits.Decider(name); by != gate.ByLimit {
		return &refusal{status: http.StatusUnprocessableEntity, text: fmt.Sprintf("%.80q has no bucket that calls use now: %s decides about them.", name, by)}
	}
	if slices.ContainsFunc(limits.Limits(), func(l registry.Limit) bool { return l.Name == name && l.PerKey }) {
		return &refusal{status: http.StatusUnprocessableEntity, text: fmt.Sprintf("%.80q has a bucket for each key, and none of its own.", name)}
	}
	return nil
}

// ResetIn returns a function for Config.Reset that resets buckets of a registry. It fails like PenalizeIn.
func ResetIn(limits *registry.Registry) func(ctx context.Context, name string) error {
	return func(ctx context.Context, name string) error {
		if err := used(limits, name); err != nil {
			return err
		}
		return limits.Reset(ctx, name)
	}
}

var errMissing = &refusal{status: http.StatusNotFound, text: "This console is not configured for this action."}

func (c *Console) save(ctx context.Context, user principal, o *changeRequest) (string, error) {
	if c.config.Editor == nil {
		return "", errNoEditor
	}
	if len(o.Values) == 0 { // the Editor would take an empty set of values for a removal
		return "", missing("values", "The request has no values for the row.")
	}
	a, err := c.config.Editor.Change(ctx, editor.Change{Name: o.Name, From: o.From, To: o.Values, Who: user.name, Why: o.Why})
	if err != nil {
		return "", c.conflict(ctx, o, err)
	}
	return c.outcome(&a), nil
}

// outcome describes a change that was made.
func (c *Console) outcome(a *editor.AuditEntry) string {
	what := strings.Join(c.list([]editor.AuditEntry{*a})[0].What, ", ")
	return fmt.Sprintf("Saved as change %d: %s. Each gateway applies it with its next load.", a.ID, what)
}

// conflict returns the error for a row that was changed meanwhile. It names the author, if the audit has the change, and the
// values that differ from those on the page, or from those that the change to undo had written. Other errors are converted by
// refusalOf.
func (c *Console) conflict(ctx context.Context, o *changeRequest, err error) error {
	var conflict *editor.ConflictError
	if !errors.As(err, &conflict) {
		return c.refusalOf(err)
	}
	entries := c.entriesOf(ctx, o, conflict.Name)
	was := editor.Values(o.Was)
	if i := slices.IndexFunc(entries, func(a editor.AuditEntry) bool { return o.ID != 0 && a.ID == o.ID }); i >= 0 {
		was = editor.Values{}
		for _, column := range entries[i].Changed() {
			if value, ok := entries[i].To[column]; ok {
				was[column] = value
			}
		}
	}
	what := "row"
	if len(entries) > 0 {
		if _, of := c.names(&entries[0]); of == "switch" {
			what = of
		}
	}
	r := &refusal{status: http.StatusConflict, text: "The " + what + " was changed meanwhile"}
	if conflict.Now == nil {
		r.text = "The row was removed meanwhile"
	} else {
		now := editor.Values{}
		for column := range was {
			now[column] = conflict.Now.Values[column]
		}
		r.changes = c.differences(was, now)
	}
	switch {
	case len(entries) == 0 || entries[0].Action != "" || !c.matches(&entries[0], conflict.Now):
		r.text += ". The audit table has no entry for that change"
	default:
		e := &entries[0]
		r.at = e.At
		r.text += fmt.Sprintf(" by %s on %s (%s)", figure.Name(e.Who), figure.Clock(e.At), figure.Name(e.Why))
	}
	r.text += ". Nothing was written."
	return r
}

// entriesOf returns the audit entries about a row, the newest first. For an undo they are those about the same row or switch
// as the entry to undo: an audit can have those of several tables.
func (c *Console) entriesOf(ctx context.Context, o *changeRequest, name string) []editor.AuditEntry {
	if o.ID == 0 {
		entries, _ := c.config.Editor.History(ctx, name, 1)
		return entries
	}
	entries, _ := c.config.Editor.History(ctx, "", mostEntries)
	i := slices.IndexFunc(entries, func(a editor.AuditEntry) bool { return a.ID == o.ID })
	if i < 0 {
		return nil
	}
	undone := entries[i]
	return slices.DeleteFunc(entries, func(a editor.AuditEntry) bool { return a.Table != undone.Table || a.Name != undone.Name })
}

// matches reports whether a row has the values that an audit entry gave it.
func (c *Console) matches(e *editor.AuditEntry, now *editor.Row) bool {
	if now == nil || e.To == nil {
		return now == nil && e.To == nil
	}
	return len(c.differences(e.To, now.Values)) == 0
}

func (c *Console) remove(ctx context.Context, user principal, o *changeRequest) (string, error) {
	switch {
	case c.config.Editor == nil:
		return "", errNoEditor
	case o.From == "":
		return "", missing("from", "The request has no version of the row to remove.")
	}
	a, err := c.config.Editor.Change(ctx, editor.Change{Name: o.Name, From: o.From, Who: user.name, Why: o.Why})
	if err != nil {
		return "", c.conflict(ctx, o, err)
	}
	if left := a.Left; left != nil && left.Bad != nil {
		return fmt.Sprintf("Removed by change %d. The table has another row of that name, %s, which is rejected: %v.", a.ID, left.ID, left.Bad), nil
	} else if left != nil {
		return fmt.Sprintf("Removed by change %d. The table has another row of that name, %s, which is in force now: %s.", a.ID, left.ID, left.Limit.String()), nil
	}
	return fmt.Sprintf("Removed by change %d.", a.ID), nil
}

// shadow writes the values of the form together with the row's shadow, in one change: alone, the shadow would drop the edit.
func (c *Console) shadow(ctx context.Context, user principal, o *changeRequest) (string, error) {
	switch {
	case c.config.Editor == nil:
		return "", errNoEditor
	case o.On == nil:
		return "", errOn
	}
	to := editor.Values{}
	maps.Copy(to, o.Values)
	to[c.config.Editor.Columns().Shadow] = editor.Text(*o.On)
	a, err := c.config.Editor.Change(ctx, editor.Change{Name: o.Name, From: o.From, To: to, Who: user.name, Why: o.Why})
	if err != nil {
		return "", c.conflict(ctx, o, err)
	}
	return c.outcome(&a), nil
}

func (c *Console) undo(ctx context.Context, user principal, o *changeRequest) (string, error) {
	if c.config.Editor == nil {
		return "", errNoEditor
	}
	a, err := c.config.Editor.Undo(ctx, o.ID, user.name, o.Why)
	if err != nil {
		return "", c.conflict(ctx, o, err)
	}
	done := fmt.Sprintf("Undone by change %d.", a.ID)
	if on, known := c.switchAfter(&a, a.To); known {
		done += " " + c.turned(ctx, user, o, on)
	}
	return done, nil
}

func (c *Console) turn(ctx context.Context, user principal, o *changeRequest) (string, error) {
	switch {
	case c.config.Turn == nil:
		return "", errMissing
	case o.On == nil:
		return "", errOn
	case strings.TrimSpace(o.Why) == "":
		return "", errWhy
	}
	on := *o.On
	switch err := c.config.Turn(ctx, on, user.name, o.Why); {
	case errors.Is(err, ErrNotAudited):
		c.config.Log.Warn("console: switch turned, but not recorded in the audit table", "on", on, "who", user.name, "why", o.Why, "error", err)
	case err != nil:
		return "", c.refusalOf(err)
	}
	return c.turned(ctx, user, o, on), nil
}

// turned announces that a person has turned the switch, and describes it.
func (c *Console) turned(ctx context.Context, user principal, o *changeRequest, on bool) string {
	kind, text := fleet.SwitchOff, "The switch is off: every call passes."
	if on {
		kind, text = fleet.SwitchOn, "The switch is on: limits apply."
	}
	c.announce(ctx, &fleet.Event{Kind: kind, Who: user.name, Why: o.Why})
	return text
}

var errWhy = missing("why", "A reason is needed.")

func (c *Console) penalize(ctx context.Context, user principal, o *changeRequest) (string, error) {
	d := time.Duration(o.Seconds * float64(time.Second))
	switch {
	case c.config.Penalize == nil:
		return "", errMissing
	case !(o.Seconds > 0) || d > maxPenalty || d <= 0:
		return "", missing("seconds", "A limit can be held back for more than 0 and at most 3600 seconds.")
	}
	err := c.audited(ctx, user, o, "hold back for "+figure.Span(d), func(ctx context.Context) error { return c.config.Penalize(ctx, o.Name, d) })
	if err != nil {
		return "", err
	}
	c.announce(ctx, &fleet.Event{Kind: fleet.Penalized, Limit: o.Name, For: d, Who: user.name, Why: o.Why})
	return "Held back for " + figure.Span(d) + ".", nil
}

func (c *Console) reset(ctx context.Context, user principal, o *changeRequest) (string, error) {
	if c.config.Reset == nil {
		return "", errMissing
	}
	err := c.audited(ctx, user, o, "reset", func(ctx context.Context) error { return c.config.Reset(ctx, o.Name) })
	if err != nil {
		return "", err
	}
	c.announce(ctx, &fleet.Event{Kind: fleet.LimitReset, Limit: o.Name, Who: user.name, Why: o.Why})
	return "Reset.", nil
}

// announce adds a person's action to the fleet's events. A failure is only logged, since the action is complete.
func (c *Console) announce(ctx context.Context, e *fleet.Event) {
	if c.config.Announce == nil {
		return
	}
	if err := c.config.Announce(ctx, *e); err != nil {
		c.config.Log.Warn("console: action not recorded among the events", "what", string(e.Kind), "limit", e.Limit, "who", e.Who, "error", err)
	}
}

// confirm accepts that the table has lost more than half of its limits.
func (c *Console) confirm(ctx context.Context, user principal, o *changeRequest) (string, error) {
	switch {
	case c.config.Confirm == nil:
		return "", errMissing
	case strings.TrimSpace(o.Why) == "":
		return "", errWhy
	}
	// A confirmation also counts for a loss that follows shortly. Without a loss it would approve one that nobody has seen.
	v, err := c.board.now(ctx)
	if err != nil {
		return "", &refusal{status: http.StatusBadGateway, text: lost(err)}
	}
	if worst, _ := v.loss(); worst == nil {
		return "", errNoLoss
	}
	do := func(ctx context.Context) error { return c.config.Confirm(ctx, user.name, o.Why) }
	if c.config.Editor == nil {
		err = do(ctx)
	} else {
		_, err = c.config.Editor.Act(ctx, editor.Action{What: "confirm that limits are gone from the table", Who: user.name, Why: o.Why}, do)
	}
	if err != nil {
		return "", c.refusalOf(err)
	}
	c.announce(ctx, &fleet.Event{Kind: fleet.LossConfirmed, Who: user.name, Why: o.Why})
	return "Confirmed. Gateways apply it within two seconds.", nil
}

var errNoLoss = &refusal{status: http.StatusConflict, text: "There is nothing to confirm: no instance reports that limits are gone from the table."}

// audited runs an action that changes no row, and records it in the audit. Without an Editor only the log records it.
func (c *Console) audited(ctx context.Context, user principal, o *changeRequest, what string, do func(context.Context) error) error {
	var err error
	switch {
	case strings.TrimSpace(o.Why) == "":
		return errWhy
	case o.Name == "":
		return errName
	case c.config.Editor == nil:
		err = do(ctx)
	default:
		_, err = c.config.Editor.Act(ctx, editor.Action{Name: o.Name, What: what, Who: user.name, Why: o.Why}, do)
	}
	if err != nil {
		return c.refusalOf(err)
	}
	return nil
}

package console

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/console/figure"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	limitgate "github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// order is what a page sends to change something.
type order struct {
	Name    string             `json:"name"`
	From    editor.Version     `json:"from"`
	Values  map[string]*string `json:"values"` // null: NULL
	Was     map[string]*string `json:"was"`    // what the page showed, for the report of a conflict
	Why     string             `json:"why"`
	ID      int64              `json:"id"`
	On      bool               `json:"on"`
	Seconds float64            `json:"seconds"`
}

const (
	maxOrder   = 64 << 10
	maxPenalty = time.Hour
)

// acts are what can be changed: each does it, and says in words what was done.
func (c *Console) acts() map[string]func(context.Context, caller, *order) (string, error) {
	return map[string]func(context.Context, caller, *order) (string, error){
		"save": c.save, "remove": c.remove, "shadow": c.shadow, "undo": c.undo, "switch": c.turn, "penalize": c.penalize, "reset": c.reset, "confirm": c.confirm,
	}
}

// act makes a handler of one: who asks must be allowed to, and the request must be a page's of this console.
func (c *Console) act(what string, do func(context.Context, caller, *order) (string, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		asks := who(r)
		o, err := c.read(w, r)
		if err != nil {
			c.refuse(w, r, err)
			return
		}
		ctx, cancel := context.WithTimeout(r.Context(), editTimeout)
		defer cancel()
		done, err := do(ctx, asks, o)
		if err != nil {
			c.config.Log.Warn("console: a change was refused", "what", what, "who", asks.name, "limit", o.Name, "error", err)
			c.refuse(w, r, err)
			return
		}
		c.config.Log.Info("console: changed", "what", what, "who", asks.name, "limit", o.Name, "why", o.Why, "done", done)
		writeJSON(w, http.StatusOK, map[string]string{"done": done})
	}
}

// read checks that a request may change something, and reads what.
func (c *Console) read(w http.ResponseWriter, r *http.Request) (*order, error) {
	if err := c.gate.mayWrite(who(r), r); err != nil {
		return nil, err
	}
	if kind, _, _ := strings.Cut(r.Header.Get("Content-Type"), ";"); kind != "application/json" {
		return nil, &refusal{status: http.StatusUnsupportedMediaType, text: "Changes are sent as application/json."}
	}
	o := new(order)
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxOrder))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(o); err != nil {
		return nil, &refusal{status: http.StatusBadRequest, text: "What was sent cannot be read: " + err.Error()}
	}
	if len(o.Name) > maxName {
		return nil, errName
	}
	return o, nil
}

// PenalizeIn holds buckets of a registry back, for Config.Penalize. It fails where calls would not notice. The registry must have the
// options that those of the instances have.
func PenalizeIn(limits *registry.Registry) func(ctx context.Context, name string, d time.Duration) error {
	return func(ctx context.Context, name string, d time.Duration) error {
		if err := used(limits, name); err != nil {
			return err
		}
		return limits.Penalize(ctx, name, d)
	}
}

// used tells why no call uses a bucket of that name.
func used(limits *registry.Registry, name string) error {
	if by, _ := limits.Decider(name); by != limitgate.ByLimit {
		return &refusal{status: http.StatusUnprocessableEntity, text: fmt.Sprintf("%.80q has no bucket that calls use now: %s decides about them.", name, by)}
	}
	if slices.ContainsFunc(limits.Limits(), func(l registry.Limit) bool { return l.Name == name && l.PerKey }) {
		return &refusal{status: http.StatusUnprocessableEntity, text: fmt.Sprintf("%.80q has a bucket for each key, and none of its own.", name)}
	}
	return nil
}

// ResetIn resets buckets of a registry, for Config.Reset, as PenalizeIn does.
func ResetIn(limits *registry.Registry) func(ctx context.Context, name string) error {
	return func(ctx context.Context, name string) error {
		if err := used(limits, name); err != nil {
			return err
		}
		return limits.Reset(ctx, name)
	}
}

var errMissing = &refusal{status: http.StatusNotFound, text: "This cannot be done here: the console was not given what it takes."}

func (c *Console) save(ctx context.Context, asks caller, o *order) (string, error) {
	if c.config.Editor == nil {
		return "", errNoEditor
	}
	if len(o.Values) == 0 { // to an Editor, nothing that a row shall say means that there shall be none
		return "", &refusal{status: http.StatusUnprocessableEntity, text: "What the row shall say was not said."}
	}
	a, err := c.config.Editor.Change(ctx, editor.Change{Name: o.Name, From: o.From, To: o.Values, Who: asks.name, Why: o.Why})
	if err != nil {
		return "", c.conflict(ctx, o, err)
	}
	return c.outcome(&a), nil
}

// outcome is what a change has done.
func (c *Console) outcome(a *editor.AuditEntry) string {
	what := strings.Join(c.list([]editor.AuditEntry{*a})[0].What, ", ")
	return fmt.Sprintf("Saved as change %d: %s. Each gateway takes it up at its next load.", a.ID, what)
}

// conflict returns the error for a row that was changed meanwhile: by whom, if the audit shows it, and in what it differs from what the
// page showed. Other errors are returned as they are said.
func (c *Console) conflict(ctx context.Context, o *order, err error) error {
	var conflict *editor.ConflictError
	if !errors.As(err, &conflict) {
		return c.said(err)
	}
	r := &refusal{status: http.StatusConflict}
	if conflict.Now == nil {
		r.text = "The row was removed meanwhile"
	} else {
		r.text = "The row was changed meanwhile"
		was := editor.Values{}
		for column, v := range o.Was {
			was[column] = v
		}
		now := editor.Values{}
		for column := range was {
			now[column] = conflict.Now.Values[column]
		}
		r.changes = c.differences(was, now)
	}
	entries, _ := c.config.Editor.History(ctx, o.Name, 1)
	switch {
	case len(entries) == 0 || entries[0].Action != "" || !c.led(&entries[0], conflict.Now):
		r.text += ", not by an editor that writes the audit table"
	default:
		e := &entries[0]
		r.text += fmt.Sprintf(" by %s on %s (%s)", e.Who, figure.Clock(e.At), e.Why)
	}
	r.text += ". Nothing was written."
	return r
}

// led reports whether a row is what an entry of the audit made of it.
func (c *Console) led(e *editor.AuditEntry, now *editor.Row) bool {
	if now == nil || e.To == nil {
		return now == nil && e.To == nil
	}
	return len(c.differences(e.To, now.Values)) == 0
}

func (c *Console) remove(ctx context.Context, asks caller, o *order) (string, error) {
	switch {
	case c.config.Editor == nil:
		return "", errNoEditor
	case o.From == "":
		return "", &refusal{status: http.StatusUnprocessableEntity, text: "Which version of the row is removed was not said."}
	}
	a, err := c.config.Editor.Change(ctx, editor.Change{Name: o.Name, From: o.From, Who: asks.name, Why: o.Why})
	if err != nil {
		return "", c.conflict(ctx, o, err)
	}
	if left := a.Left; left != nil && left.Bad != nil {
		return fmt.Sprintf("Removed by change %d. The table has another row of that name, %s, which is bad: %v.", a.ID, left.ID, left.Bad), nil
	} else if left != nil {
		return fmt.Sprintf("Removed by change %d. The table has another row of that name, %s, which is in force now: %s.", a.ID, left.ID, left.Limit.String()), nil
	}
	return fmt.Sprintf("Removed by change %d.", a.ID), nil
}

func (c *Console) shadow(ctx context.Context, asks caller, o *order) (string, error) {
	if c.config.Editor == nil {
		return "", errNoEditor
	}
	a, err := c.config.Editor.SetShadow(ctx, o.Name, o.From, o.On, asks.name, o.Why)
	if err != nil {
		return "", c.conflict(ctx, o, err)
	}
	return c.outcome(&a), nil
}

func (c *Console) undo(ctx context.Context, asks caller, o *order) (string, error) {
	if c.config.Editor == nil {
		return "", errNoEditor
	}
	a, err := c.config.Editor.Undo(ctx, o.ID, asks.name, o.Why)
	if err != nil {
		return "", c.said(err)
	}
	return fmt.Sprintf("Undone by change %d.", a.ID), nil
}

func (c *Console) turn(ctx context.Context, asks caller, o *order) (string, error) {
	if c.config.Turn == nil {
		return "", errMissing
	}
	if strings.TrimSpace(o.Why) == "" {
		return "", errWhy
	}
	switch err := c.config.Turn(ctx, o.On, asks.name, o.Why); {
	case errors.Is(err, ErrNotAudited):
		c.config.Log.Warn("console: the switch was turned, and the audit table does not say so", "on", o.On, "who", asks.name, "why", o.Why, "error", err)
	case err != nil:
		return "", c.said(err)
	}
	kind := fleet.SwitchOff
	if o.On {
		kind = fleet.SwitchOn
	}
	c.announce(ctx, &fleet.Event{Kind: kind, Who: asks.name, Why: o.Why})
	if o.On {
		return "The switch is on: limits apply.", nil
	}
	return "The switch is off: every call passes.", nil
}

var errWhy = &refusal{status: http.StatusUnprocessableEntity, text: "A reason is needed."}

func (c *Console) penalize(ctx context.Context, asks caller, o *order) (string, error) {
	d := time.Duration(o.Seconds * float64(time.Second))
	switch {
	case c.config.Penalize == nil:
		return "", errMissing
	case !(o.Seconds > 0) || d > maxPenalty || d <= 0:
		return "", &refusal{status: http.StatusUnprocessableEntity, text: "A limit can be held back for more than 0 and at most 3600 seconds."}
	}
	err := c.audited(ctx, asks, o, "hold back for "+figure.Span(d), func(ctx context.Context) error { return c.config.Penalize(ctx, o.Name, d) })
	if err != nil {
		return "", err
	}
	c.announce(ctx, &fleet.Event{Kind: fleet.Penalized, Limit: o.Name, For: d, Who: asks.name, Why: o.Why})
	return "Held back for " + figure.Span(d) + ".", nil
}

func (c *Console) reset(ctx context.Context, asks caller, o *order) (string, error) {
	if c.config.Reset == nil {
		return "", errMissing
	}
	err := c.audited(ctx, asks, o, "reset", func(ctx context.Context) error { return c.config.Reset(ctx, o.Name) })
	if err != nil {
		return "", err
	}
	c.announce(ctx, &fleet.Event{Kind: fleet.LimitReset, Limit: o.Name, Who: asks.name, Why: o.Why})
	return "Reset.", nil
}

// announce adds what a person has done to the fleet's events. It is done already, so a failure is only logged.
func (c *Console) announce(ctx context.Context, e *fleet.Event) {
	if c.config.Announce == nil {
		return
	}
	if err := c.config.Announce(ctx, *e); err != nil {
		c.config.Log.Warn("console: what was done is missing among the events", "what", string(e.Kind), "limit", e.Limit, "who", e.Who, "error", err)
	}
}

// confirm accepts that the table has lost more than half of its limits.
func (c *Console) confirm(ctx context.Context, asks caller, o *order) (string, error) {
	if c.config.Confirm == nil {
		return "", errMissing
	}
	if strings.TrimSpace(o.Why) == "" {
		return "", errWhy
	}
	do := func(ctx context.Context) error { return c.config.Confirm(ctx, asks.name, o.Why) }
	var err error
	if c.config.Editor == nil {
		err = do(ctx)
	} else {
		_, err = c.config.Editor.Act(ctx, editor.Action{What: "confirm that limits are gone from the table", Who: asks.name, Why: o.Why}, do)
	}
	if err != nil {
		return "", c.said(err)
	}
	c.announce(ctx, &fleet.Event{Kind: fleet.LossConfirmed, Who: asks.name, Why: o.Why})
	return "Confirmed. Gateways take it over within two seconds.", nil
}

// audited does what changes no row, and has it in the audit. Without an Editor the log has it alone.
func (c *Console) audited(ctx context.Context, asks caller, o *order, what string, do func(context.Context) error) error {
	var err error
	switch {
	case strings.TrimSpace(o.Why) == "":
		return errWhy
	case o.Name == "":
		return errName
	case c.config.Editor == nil:
		err = do(ctx)
	default:
		_, err = c.config.Editor.Act(ctx, editor.Action{Name: o.Name, What: what, Who: asks.name, Why: o.Why}, do)
	}
	if err != nil {
		return c.said(err)
	}
	return nil
}

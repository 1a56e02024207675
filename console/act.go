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

	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// order is what a page sends to change something.
type order struct {
	Name    string             `json:"name"`
	From    sqlsource.Version  `json:"from"`
	Values  map[string]*string `json:"values"` // null: NULL
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
		"save": c.save, "remove": c.remove, "shadow": c.shadow, "undo": c.undo, "switch": c.turn, "penalize": c.penalize, "reset": c.reset,
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
		return nil, &refusal{http.StatusUnsupportedMediaType, "Changes are sent as application/json."}
	}
	o := new(order)
	decoder := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxOrder))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(o); err != nil {
		return nil, &refusal{http.StatusBadRequest, "What was sent cannot be read: " + err.Error()}
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
	if by, _ := limits.Decider(name); by != registry.ByLimit {
		return &refusal{http.StatusUnprocessableEntity, fmt.Sprintf("%.80q has no bucket that calls use now: %s decides about them.", name, by)}
	}
	if slices.ContainsFunc(limits.Limits(), func(l registry.Limit) bool { return l.Name == name && l.PerKey }) {
		return &refusal{http.StatusUnprocessableEntity, fmt.Sprintf("%.80q has a bucket for each key, and none of its own.", name)}
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

var errMissing = &refusal{http.StatusNotFound, "This cannot be done here: the console was not given what it takes."}

func (c *Console) save(ctx context.Context, asks caller, o *order) (string, error) {
	if c.config.Editor == nil {
		return "", errNoEditor
	}
	if len(o.Values) == 0 { // to an Editor, nothing that a row shall say means that there shall be none
		return "", &refusal{http.StatusUnprocessableEntity, "What the row shall say was not said."}
	}
	a, err := c.config.Editor.Change(ctx, sqlsource.Change{Name: o.Name, From: o.From, To: o.Values, Who: asks.name, Why: o.Why})
	if err != nil {
		return "", said(err)
	}
	return fmt.Sprintf("Saved as change %d.", a.ID), nil
}

func (c *Console) remove(ctx context.Context, asks caller, o *order) (string, error) {
	switch {
	case c.config.Editor == nil:
		return "", errNoEditor
	case o.From == "":
		return "", &refusal{http.StatusUnprocessableEntity, "Which version of the row is removed was not said."}
	}
	a, err := c.config.Editor.Change(ctx, sqlsource.Change{Name: o.Name, From: o.From, Who: asks.name, Why: o.Why})
	if err != nil {
		return "", said(err)
	}
	return fmt.Sprintf("Removed by change %d.", a.ID), nil
}

func (c *Console) shadow(ctx context.Context, asks caller, o *order) (string, error) {
	if c.config.Editor == nil {
		return "", errNoEditor
	}
	a, err := c.config.Editor.SetShadow(ctx, o.Name, o.From, o.On, asks.name, o.Why)
	if err != nil {
		return "", said(err)
	}
	return fmt.Sprintf("Saved as change %d.", a.ID), nil
}

func (c *Console) undo(ctx context.Context, asks caller, o *order) (string, error) {
	if c.config.Editor == nil {
		return "", errNoEditor
	}
	a, err := c.config.Editor.Undo(ctx, o.ID, asks.name, o.Why)
	if err != nil {
		return "", said(err)
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
		return "", said(err)
	}
	if o.On {
		return "The switch is on: limits apply.", nil
	}
	return "The switch is off: every call passes.", nil
}

var errWhy = &refusal{http.StatusUnprocessableEntity, "A reason is needed."}

func (c *Console) penalize(ctx context.Context, asks caller, o *order) (string, error) {
	d := time.Duration(o.Seconds * float64(time.Second))
	switch {
	case c.config.Penalize == nil:
		return "", errMissing
	case !(o.Seconds > 0) || d > maxPenalty || d <= 0:
		return "", &refusal{http.StatusUnprocessableEntity, "A limit can be held back for more than 0 and at most 3600 seconds."}
	}
	err := c.audited(ctx, asks, o, "hold back for "+span(d), func(ctx context.Context) error { return c.config.Penalize(ctx, o.Name, d) })
	if err != nil {
		return "", err
	}
	return "Held back for " + span(d) + ".", nil
}

func (c *Console) reset(ctx context.Context, asks caller, o *order) (string, error) {
	if c.config.Reset == nil {
		return "", errMissing
	}
	err := c.audited(ctx, asks, o, "reset", func(ctx context.Context) error { return c.config.Reset(ctx, o.Name) })
	if err != nil {
		return "", err
	}
	return "Reset.", nil
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
		_, err = c.config.Editor.Act(ctx, sqlsource.Action{Name: o.Name, What: what, Who: asks.name, Why: o.Why}, do)
	}
	if err != nil {
		return said(err)
	}
	return nil
}

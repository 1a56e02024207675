package editor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Action is something done to a bucket or to the whole fleet without changing a row: a penalty, a reset.
type Action struct {
	// Name of the bucket; empty for the whole fleet.
	Name string
	// What is the action, 1 to 500 bytes.
	What string
	// Who does it, 1 to 256 bytes, and Why, 1 to 2000 bytes.
	Who, Why string
}

const maxAction = 500

// Act records an action in the audit table, and then performs it by calling do. If it cannot be recorded, do is not called.
// If do fails, a second entry records the failure. Undo cannot reverse an action.
func (e *Editor) Act(ctx context.Context, a Action, do func(context.Context) error) (AuditEntry, error) {
	if err := a.check(); err != nil {
		return AuditEntry{}, err
	}
	entry, err := e.note(ctx, &a)
	if err != nil {
		return AuditEntry{}, err
	}
	failed := do(ctx)
	if failed == nil {
		return entry, nil
	}
	// The context of do may have ended.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), actionWait)
	defer cancel()
	a.What = shortenText(fmt.Sprintf("%s: failed: %v", a.What, failed), maxAction)
	_, err = e.note(ctx, &a)
	return entry, errors.Join(failed, err)
}

// actionWait bounds the time to record that an action failed.
const actionWait = 2 * time.Second

func (a *Action) check() error {
	name := a.Name
	if name == "" {
		name = "-" // the whole fleet
	}
	if err := reasons(name, a.Who, a.Why); err != nil {
		return err
	}
	if strings.TrimSpace(a.What) == "" || len(a.What) > maxAction {
		return &registry.RowError{Row: newRow, Name: a.Name, Field: "what", Value: registry.ShortValue([]byte(a.What)), Want: fmt.Sprintf("1 to %d bytes", maxAction)}
	}
	return nil
}

// note writes the entry of an action.
func (e *Editor) note(ctx context.Context, a *Action) (entry AuditEntry, err error) {
	if err := e.notes.take(ctx); err != nil {
		return entry, e.failed("write", e.audit, err)
	}
	defer e.notes.leave()
	if err := e.audited(ctx); err != nil {
		return entry, err
	}
	tx, err := e.db.BeginTx(ctx, nil)
	if err != nil {
		return entry, e.failed("begin a change of", e.audit, err)
	}
	defer func() { _ = tx.Rollback() }() // has no effect after Commit
	s := &session{Editor: e, q: tx, tx: tx}
	entry, err = s.record(ctx, &AuditEntry{Who: a.Who, Why: a.Why, Table: e.table.String(), Name: a.Name, Action: a.What}, 0)
	if err == nil {
		err = e.failed("commit a change of", e.audit, tx.Commit())
	}
	if err != nil {
		return AuditEntry{}, err
	}
	return entry, nil
}

// actionText encodes an action for the column toRow: a JSON string, where a row is a JSON object.
func actionText(what string) *string {
	text, _ := json.Marshal(strings.ToValidUTF8(what, "?")) // a string always encodes
	return Text(string(text))
}

// parseAction is the inverse of actionText. It returns false for a row.
func parseAction(text *string) (what string, ok bool) {
	if text == nil || !strings.HasPrefix(*text, `"`) {
		return "", false
	}
	return what, json.Unmarshal([]byte(*text), &what) == nil
}

func shortenText(s string, most int) string {
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most-len("…")], "") + "…"
}

package sqlsource

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console/editor"
)

// TestAct: the actor, the action and the reason of a change to a bucket are recorded before it takes effect, and cannot be undone. If they
// cannot be recorded, nothing is changed.
func TestAct(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		e := editorOf(t, b, db)
		reset := editor.Action{Name: "/a", What: `held "back" for 30 s`, Who: "ann", Why: "a fault"}
		_, err := e.Act(ctx, reset, func(context.Context) error { t.Error("it was done"); return nil })
		require.ErrorIs(t, err, editor.ErrNoAudit)

		e = newEditor(t, b, db)
		done, err := e.Act(ctx, reset, func(ctx context.Context) error {
			history, err := e.History(ctx, "/a", 10)
			require.Len(t, history, 1, "it is written down before")
			return err
		})
		require.NoError(t, err)
		require.Equal(t, [4]string{"/a", `held "back" for 30 s`, "ann", "a fault"}, [4]string{done.Name, done.Action, done.Who, done.Why})
		require.Empty(t, done.From)
		require.Empty(t, done.To)
		_, err = e.Undo(ctx, done.ID, "ben", "back")
		require.ErrorIs(t, err, editor.ErrAction)

		away := errors.New("no connection")
		stopped, stop := context.WithCancel(ctx)
		_, err = e.Act(stopped, editor.Action{Name: "/a", What: "reset", Who: "ben", Why: "stuck"}, func(context.Context) error { stop(); return away })
		require.ErrorIs(t, err, away)
		_, err = e.Act(ctx, editor.Action{What: "switched off", Who: "ben", Why: "an emergency"}, func(context.Context) error { return nil })
		require.NoError(t, err)

		var said []string
		history, err := e.History(ctx, "", 10)
		require.NoError(t, err)
		for _, entry := range history {
			said = append(said, entry.Name+" "+entry.Action)
		}
		require.Equal(t, []string{" switched off", "/a reset: failed: no connection", "/a reset", `/a held "back" for 30 s`}, said)
		history, err = e.History(ctx, "/a", 10)
		require.NoError(t, err)
		require.Len(t, history, 3)
	})
}

package sqlsource

import (
	"database/sql"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console/editor"
)

// The removal of one of two rows of a name reports which row is in force for the name now.
func TestRemoveOneOfTwo(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		e := newEditor(t, b, db)
		b.insert(t, db, conf, "name, rate, lastModifyTime", "/a", 100, "2020-01-01 00:00:00")
		b.insert(t, db, conf, "name, rate, lastModifyTime", "/a", 5, "2021-01-01 00:00:00")
		row := get(t, e, "/a")
		require.Equal(t, 5.0, row.Limit.Rate)
		removed, err := e.Change(ctx, editor.Change{Name: "/a", From: row.Version, Who: "ann", Why: "no limit any more"})
		require.NoError(t, err)
		require.NotNil(t, removed.Left)
		require.Equal(t, 100.0, removed.Left.Limit.Rate)
		require.Equal(t, get(t, e, "/a"), *removed.Left)
		removed, err = e.Change(ctx, editor.Change{Name: "/a", From: removed.Left.Version, Who: "ann", Why: "no limit any more"})
		require.NoError(t, err)
		require.Nil(t, removed.Left)
	})
}

// An undo changes back the row that was changed, and no other one of its name: neither one that was added in its place since, nor one that
// comes before it.
func TestUndoFindsItsRow(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		e := newEditor(t, b, db)
		change := func(from editor.Version, values editor.Values) editor.AuditEntry {
			t.Helper()
			entry, err := e.Change(ctx, editor.Change{Name: "/a", From: from, To: values, Who: "ann", Why: "to see"})
			require.NoError(t, err)
			return entry
		}
		added := change("", to(e, 5, 0.5))
		changed := change(get(t, e, "/a").Version, to(e, 6, nil))
		first := get(t, e, "/a")

		b.insert(t, db, conf, "name, rate, max_wait, disabled, lastModifyTime", "/a", 6, 0.5, 0, "2037-01-01 00:00:00") // a twin, which is in force
		require.NotEqual(t, first.ID, get(t, e, "/a").ID)
		undone, err := e.Undo(ctx, changed.ID, "ben", "back")
		require.NoError(t, err)
		require.Equal(t, first.ID, *undone.To[e.Columns().ID])
		require.Equal(t, 6.0, get(t, e, "/a").Limit.Rate, "the twin is as it was")

		exec(t, db, "DELETE FROM "+conf+" WHERE "+b.quoted(b.column("configId"))+" = "+first.ID)
		_, err = e.Undo(ctx, added.ID, "ben", "back")
		require.ErrorIs(t, err, editor.ErrConflict, "its row is gone, and the other one of its name is not removed")
		require.Equal(t, 6.0, get(t, e, "/a").Limit.Rate)
	})
}

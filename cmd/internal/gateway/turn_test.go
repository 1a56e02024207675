package gateway

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// notes is an audit that answers so.
type notes struct {
	console.Editor
	err   error
	hangs bool
}

func (n *notes) Act(ctx context.Context, _ editor.Action, do func(context.Context) error) (editor.AuditEntry, error) {
	if n.hangs {
		<-ctx.Done()
		return editor.AuditEntry{}, ctx.Err()
	}
	if n.err != nil {
		return editor.AuditEntry{}, n.err
	}
	return editor.AuditEntry{}, do(ctx)
}

// A switch in Redis is turned even if the database is unavailable, and the reply says that the audit lacks it. A refusal by the audit is
// obeyed.
func TestTurnWithoutADatabase(t *testing.T) {
	for name, test := range map[string]struct {
		audit     notes
		write     error
		turned    bool
		unaudited bool
		says      string
	}{
		"audited":        {audit: notes{}, turned: true},
		"away":           {audit: notes{err: errors.New("connection refused")}, turned: true, unaudited: true, says: "connection refused"},
		"hangs":          {audit: notes{hangs: true}, turned: true, unaudited: true, says: "deadline"},
		"no right":       {audit: notes{err: &sqlsource.RightError{Right: "INSERT", Table: "t", Err: errors.New("denied")}}, says: "denied"},
		"no audit table": {audit: notes{err: editor.ErrNoAudit}, says: editor.ErrNoAudit.Error()},
		"a bad reason":   {audit: notes{err: &registry.RowError{Field: "why", Want: "a reason"}}, says: "a reason"},
		"Redis is away":  {write: errors.New("broken pipe"), says: "broken pipe"},
		"both are away":  {audit: notes{err: errors.New("connection refused")}, write: errors.New("broken pipe"), says: "connection refused"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				writes := 0
				sw, err := killswitch.New(func(context.Context) (bool, error) { return true, nil }, killswitch.WithInterval(time.Hour),
					killswitch.WithWrite(func(context.Context, bool) error { writes++; return test.write }))
				require.NoError(t, err)
				defer sw.Close()
				ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
				defer cancel()
				err = turn(ctx, &test.audit, sw, false, "ann", "an incident")
				require.Equal(t, test.turned, !sw.Enabled())
				require.Equal(t, test.unaudited, errors.Is(err, console.ErrNotAudited))
				require.LessOrEqual(t, writes, 1)
				if test.says == "" {
					require.NoError(t, err)
					return
				}
				require.ErrorContains(t, err, test.says)
			})
		})
	}
}

// An audit table of another shape is not an unavailable database: it needs a repair.
func TestTurnWithAWrongAudit(t *testing.T) {
	for name, wrong := range map[string]string{
		"a column is missing":    "ALTER TABLE t_ratelimite_audit RENAME COLUMN why TO reason",
		"a column without value": "DROP TABLE t_ratelimite_audit; CREATE TABLE t_ratelimite_audit (auditId INTEGER PRIMARY KEY, changedBy, why, ofTable, name, fromRow, toRow, ticket NOT NULL)",
		"":                       "",
	} {
		t.Run(name, func(t *testing.T) {
			db, want := parseDSN("sqlite://"+filepath.Join(t.TempDir(), "limits.db"), true)
			require.Empty(t, want)
			limits, err := db.connect(t.Context(), false)
			require.NoError(t, err)
			defer func() { _ = limits.Close() }()
			_, err = limits.ExecContext(t.Context(), wrong)
			require.NoError(t, err)
			source, err := sqlsource.New(limits, db.dialect)
			require.NoError(t, err)
			edit, err := editor.New(limits, source)
			require.NoError(t, err)
			sw, err := killswitch.New(func(context.Context) (bool, error) { return true, nil }, killswitch.WithInterval(time.Hour),
				killswitch.WithWrite(func(context.Context, bool) error { return nil }))
			require.NoError(t, err)
			defer sw.Close()
			err = turn(t.Context(), edit, sw, false, "ann", "an incident")
			require.Equal(t, name == "", err == nil, "%v", err)
			require.NotErrorIs(t, err, console.ErrNotAudited)
			require.Equal(t, name != "", sw.Enabled())
		})
	}
}

// Whether a database is there, by what its drivers say.
func TestMisfits(t *testing.T) {
	for _, err := range []error{
		&mysql.MySQLError{Number: 1054}, &mysql.MySQLError{Number: 1364}, &pgconn.PgError{Code: "42703"}, &pgconn.PgError{Code: "23502"}, &pgconn.PgError{Code: "22001"},
	} {
		require.True(t, misfits(fmt.Errorf("wrapped: %w", err)), "%v", err)
	}
	for _, err := range []error{
		nil, errors.New("connection refused"), &mysql.MySQLError{Number: 1040}, &mysql.MySQLError{Number: 1205}, &pgconn.PgError{Code: "57P01"}, &pgconn.PgError{Code: "53300"},
	} {
		require.False(t, misfits(err), "%v", err)
	}
}

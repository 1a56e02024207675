package gateway

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// notes is an audit that answers so.
type notes struct {
	console.Editor
	err   error
	hangs bool
}

func (n *notes) Act(ctx context.Context, _ sqlsource.Action, do func(context.Context) error) (sqlsource.AuditEntry, error) {
	if n.hangs {
		<-ctx.Done()
		return sqlsource.AuditEntry{}, ctx.Err()
	}
	if n.err != nil {
		return sqlsource.AuditEntry{}, n.err
	}
	return sqlsource.AuditEntry{}, do(ctx)
}

// A switch in Redis is turned also when the database is away, and it is told that the audit does not say so. An audit that says no is heeded.
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
		"no audit table": {audit: notes{err: sqlsource.ErrNoAudit}, says: sqlsource.ErrNoAudit.Error()},
		"a bad reason":   {audit: notes{err: &registry.RowError{Field: "why", Want: "a reason"}}, says: "a reason"},
		"Redis is away":  {write: errors.New("broken pipe"), says: "broken pipe"},
		"both are away":  {audit: notes{err: errors.New("connection refused")}, write: errors.New("broken pipe"), says: "connection refused"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				writes := 0
				sw, err := registry.NewPolledSwitch(func(context.Context) (bool, error) { return true, nil }, registry.WithSwitchInterval(time.Hour),
					registry.WithSwitchWrite(func(context.Context, bool) error { writes++; return test.write }))
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

package editor

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var dialects = []sqlsource.Dialect{sqlsource.MySQL, sqlsource.PostgreSQL, sqlsource.SQLite}

// nowhere is a database that cannot be reached. What real ones do is tested in the module integration.
type nowhere struct{}

func (nowhere) Connect(context.Context) (driver.Conn, error) { return nil, errors.ErrUnsupported }
func (nowhere) Driver() driver.Driver                        { return nil }

// openNowhere returns a database that cannot be reached, and a source that reads it.
func openNowhere(t *testing.T, d sqlsource.Dialect, opts ...sqlsource.Option) (*sql.DB, *sqlsource.Source) {
	t.Helper()
	db := sql.OpenDB(nowhere{})
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	source, err := sqlsource.New(db, d, opts...)
	require.NoError(t, err)
	return db, source
}

func newEditor(t *testing.T, d sqlsource.Dialect, opts ...sqlsource.Option) *Editor {
	t.Helper()
	db, source := openNowhere(t, d, opts...)
	e, err := New(db, source)
	require.NoError(t, err)
	return e
}

// Package integration tests sqlsource against real databases: MariaDB, PostgreSQL and SQLite.
package sqlsource

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	_ "modernc.org/sqlite"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

func TestMain(m *testing.M) {
	faultlab.Parallel(6)
	code := m.Run()
	dbtest.StopShared()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// ctx is for calls that need no deadline.
var ctx = context.Background()

// backend is a kind of database.
type backend struct {
	name    string
	dialect sqlsource.Dialect
	// place makes a database (PostgreSQL: schema) of the test's own on a shared server, and returns its name and a DSN that
	// parameters can be appended to.
	place func(t testing.TB) (name, dsn string)
	// driver's name.
	driver string
	// zones are parameters that set the session's and the driver's time zone.
	zones []string
}

var backends = []backend{
	{
		name: "mariadb", dialect: sqlsource.MySQL, driver: "mysql",
		place: func(t testing.TB) (string, string) {
			dsn := dbtest.SharedMariaDB(t).DSN()
			name := unique()
			exec(t, open(t, "mysql", dsn), "CREATE DATABASE "+name)
			return name, strings.Replace(dsn, "/test?", "/"+name+"?", 1)
		},
		zones: []string{
			"", "&time_zone=%27%2B00:00%27", "&time_zone=%27%2B09:00%27", "&time_zone=%27-11:30%27&parseTime=true",
			"&parseTime=true&loc=Asia%2FTokyo", "&parseTime=true&loc=Local", "&charset=latin1", "&interpolateParams=true",
		},
	},
	{
		name: "postgresql", dialect: sqlsource.PostgreSQL, driver: "pgx",
		place: func(t testing.TB) (string, string) {
			dsn := dbtest.SharedPostgreSQL(t).DSN()
			name := unique()
			exec(t, open(t, "pgx", dsn), "CREATE SCHEMA "+name)
			return name, dsn + "&search_path=" + name
		},
		zones: []string{
			"", "&TimeZone=UTC", "&TimeZone=Asia%2FTokyo", "&TimeZone=America%2FSt_Johns", "&DateStyle=German",
			"&default_query_exec_mode=simple_protocol", "&default_query_exec_mode=exec&TimeZone=Asia%2FTokyo", "&extra_float_digits=-4",
		},
	},
	{
		name: "sqlite", dialect: sqlsource.SQLite, driver: "sqlite",
		place: func(t testing.TB) (string, string) {
			return "main", "file:" + filepath.Join(t.TempDir(), "db") + "?_pragma=busy_timeout(10000)"
		},
		zones: []string{"", "&_time_format=sqlite", "&_inttotime=1", "&_texttotime=1"},
	},
}

var places atomic.Int64

func unique() string { return fmt.Sprintf("place_%d", places.Add(1)) }

func open(t testing.TB, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	return db
}

func exec(t testing.TB, db *sql.DB, statement string, args ...any) {
	t.Helper()
	_, err := db.ExecContext(ctx, statement, args...)
	require.NoError(t, err, statement)
}

// each runs a test on all backends at the same time, each with a database of its own.
func each(t *testing.T, test func(t *testing.T, b backend, db *sql.DB, dsn string)) {
	for _, b := range backends {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			_, dsn := b.place(t)
			test(t, b, open(t, b.driver, dsn), dsn)
		})
	}
}

// params writes ? as the dialect does.
func (b backend) params(statement string) string {
	for i := 1; b.dialect == sqlsource.PostgreSQL && strings.Contains(statement, "?"); i++ {
		statement = strings.Replace(statement, "?", fmt.Sprint("$", i), 1)
	}
	return statement
}

func (b backend) insert(t testing.TB, db *sql.DB, table, columns string, args ...any) {
	t.Helper()
	marks := strings.Repeat(", ?", len(args))[2:]
	exec(t, db, b.params("INSERT INTO "+table+" ("+columns+") VALUES ("+marks+")"), args...)
}

func load(t testing.TB, b backend, db *sql.DB, opts ...sqlsource.Option) registry.Table {
	t.Helper()
	table, err := source(t, b, db, opts...).Load(ctx)
	require.NoError(t, err)
	return table
}

func source(t testing.TB, b backend, db *sql.DB, opts ...sqlsource.Option) *sqlsource.Source {
	t.Helper()
	s, err := sqlsource.New(db, b.dialect, opts...)
	require.NoError(t, err)
	return s
}

// short is a context that ends soon.
func short(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(ctx, d)
	t.Cleanup(cancel)
	return ctx
}

// column is a name as the default table has it.
func (b backend) column(name string) string {
	if b.dialect == sqlsource.PostgreSQL {
		return strings.ToLower(name)
	}
	return name
}

package gateway

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"modernc.org/sqlite" // also the driver of that name

	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

const (
	wantDSN = "sqlite://FILE, mysql://user:password@host:3306/database or postgres://user:password@host:5432/database; or file://FILE of a YAML file"
	// connectTimeout is the default time limit for connecting to a database. The DSN may set another.
	connectTimeout = 5 * time.Second
)

// database is a database that holds the limits.
type database struct {
	dialect sqlsource.Dialect
	options []sqlsource.Option
	open    func() (*sql.DB, error)
	file    string // path of a SQLite file, otherwise ""
	create  bool   // create missing tables
}

// parseDSN parses a DSN. If it is invalid, want describes what is accepted.
func parseDSN(dsn string, create bool) (db *database, want string) {
	scheme, rest, ok := strings.Cut(dsn, "://")
	if !ok {
		return nil, wantDSN
	}
	switch scheme {
	case "sqlite":
		return parseSQLite(rest, create)
	case "mysql", "mariadb":
		c, want := parseMySQL(rest)
		if want != "" {
			return nil, want
		}
		return &database{dialect: sqlsource.MySQL, create: create, open: func() (*sql.DB, error) {
			connector, err := mysql.NewConnector(c)
			if err != nil {
				return nil, err
			}
			return sql.OpenDB(connector), nil
		}}, ""
	case "postgres", "postgresql":
		c, err := pgx.ParseConfig(dsn)
		if err != nil {
			return nil, "postgres://user:password@host:5432/database?parameters, special characters of the password as %XX"
		}
		if c.ConnectTimeout == 0 {
			c.ConnectTimeout = connectTimeout
		}
		return &database{dialect: sqlsource.PostgreSQL, create: create, open: func() (*sql.DB, error) { return stdlib.OpenDB(*c), nil }}, ""
	}
	return nil, wantDSN
}

func parseSQLite(rest string, create bool) (*database, string) {
	path, query, _ := strings.Cut(rest, "?")
	parameters, err := url.ParseQuery(query)
	if path == "" || err != nil {
		return nil, "sqlite://FILE, such as sqlite://limits.db or sqlite:///var/lib/limits.db"
	}
	if !parameters.Has("mode") { // a mistyped name must not create a new database
		parameters.Set("mode", "rw")
		if create {
			parameters.Set("mode", "rwc")
		}
	}
	parameters.Add("_pragma", "busy_timeout(2000)")
	dsn := "file:" + (&url.URL{Path: path}).EscapedPath() + "?" + parameters.Encode()
	return &database{dialect: sqlsource.SQLite, file: path, create: create, open: func() (*sql.DB, error) { return sql.Open("sqlite", dsn) }}, ""
}

var driverDSN = regexp.MustCompile(`(^|@)[a-z]+\(`)

// parseMySQL parses a URL or the driver's own DSN format, user:password@tcp(host:3306)/database, which sockets need.
func parseMySQL(rest string) (*mysql.Config, string) {
	const want = "mysql://user:password@host:3306/database?parameters, special characters of the password as %XX"
	var c *mysql.Config
	if driverDSN.MatchString(rest) {
		var err error
		if c, err = mysql.ParseDSN(rest); err != nil {
			return nil, want
		}
	} else {
		u, err := url.Parse("mysql://" + rest)
		if err != nil {
			return nil, want
		}
		port := u.Port()
		if port == "" {
			port = "3306"
		}
		own := "tcp(" + net.JoinHostPort(u.Hostname(), port) + ")/" + strings.Trim(u.EscapedPath(), "/") + "?" + u.RawQuery
		if c, err = mysql.ParseDSN(own); err != nil {
			return nil, want
		}
		c.User = u.User.Username()
		c.Passwd, _ = u.User.Password()
	}
	if c.DBName == "" || strings.Contains(c.DBName, "/") {
		return nil, want
	}
	if c.Timeout == 0 {
		c.Timeout = connectTimeout
	}
	c.Logger = &mysql.NopLogger{} // every error is returned by a load
	return c, ""
}

// connect opens the database and, with --create-table, creates missing tables.
func (d *database) connect(ctx context.Context, withSwitch bool) (*sql.DB, error) {
	if d.file != "" && !d.create {
		if _, err := os.Stat(d.file); err != nil { // clearer than SQLite's own message
			return nil, fmt.Errorf("%w (--create-table creates it)", err)
		}
	}
	db, err := d.open()
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(4) // two for the limits and the switch, two more if those hang
	db.SetConnMaxLifetime(5 * time.Minute)
	if d.create {
		err = sqlsource.CreateTable(ctx, db, d.dialect, d.options...)
		if err == nil {
			err = editor.CreateAuditTable(ctx, db, d.dialect)
		}
		if err == nil && withSwitch {
			err = sqlsource.CreateSwitchTable(ctx, db, d.dialect)
		}
	}
	if err != nil {
		_ = db.Close()
		return nil, err
	}
	return db, nil
}

// hinting is a source that adds to an error what an operator can do about it.
type hinting struct{ registry.Source }

// Load implements registry.Source.
func (h hinting) Load(ctx context.Context) (registry.Table, error) {
	table, err := h.Source.Load(ctx)
	if missingTable(err) {
		err = fmt.Errorf("%w; --create-table creates a missing table, --table names another", err)
	}
	return table, err
}

func missingTable(err error) bool {
	var my *mysql.MySQLError
	var pg *pgconn.PgError
	switch {
	case err == nil:
		return false
	case errors.As(err, &my):
		return my.Number == 1146
	case errors.As(err, &pg):
		return pg.Code == "42P01"
	}
	return strings.Contains(err.Error(), "no such table")
}

// misfits reports whether a reachable database rejected a statement because its tables have another structure than the gateway expects.
func misfits(err error) bool {
	var my *mysql.MySQLError
	var pg *pgconn.PgError
	var lite *sqlite.Error
	switch {
	case errors.As(err, &my): // unknown column, column without a default, value that does not fit
		return slices.Contains([]uint16{1048, 1054, 1136, 1146, 1264, 1265, 1292, 1364, 1366, 1406, 3819, 4025}, my.Number)
	case errors.As(err, &pg): // classes: syntax or unknown name, invalid value, constraint
		return len(pg.Code) == 5 && slices.Contains([]string{"42", "22", "23"}, pg.Code[:2])
	case errors.As(err, &lite):
		return slices.Contains([]int{1, 18, 19, 20}, lite.Code()&0xff) // ERROR, TOOBIG, CONSTRAINT, MISMATCH
	}
	return false
}

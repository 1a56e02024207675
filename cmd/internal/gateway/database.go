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

	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

const (
	wantDSN = "sqlite://FILE, mysql://user:password@host:3306/database or postgres://user:password@host:5432/database; or file://FILE of a YAML file"
	// quickly is how long connecting to a database may take, unless its DSN says otherwise.
	quickly = 5 * time.Second
)

// database is where the limits are.
type database struct {
	dialect sqlsource.Dialect
	options []sqlsource.Option
	open    func() (*sql.DB, error)
	file    string // of SQLite
	create  bool
}

// parseDSN returns what was wanted instead if the DSN cannot be used.
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
			c.ConnectTimeout = quickly
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
	if !parameters.Has("mode") { // a mistyped name must not become a new database
		parameters.Set("mode", "rw")
		if create {
			parameters.Set("mode", "rwc")
		}
	}
	parameters.Add("_pragma", "busy_timeout(2000)")
	dsn := "file:" + (&url.URL{Path: path}).EscapedPath() + "?" + parameters.Encode()
	return &database{dialect: sqlsource.SQLite, file: path, create: create, open: func() (*sql.DB, error) { return sql.Open("sqlite", dsn) }}, ""
}

var driversOwn = regexp.MustCompile(`(^|@)[a-z]+\(`)

// parseMySQL reads a URL, or what the driver itself calls a DSN: user:password@tcp(host:3306)/database, for sockets.
func parseMySQL(rest string) (*mysql.Config, string) {
	const want = "mysql://user:password@host:3306/database?parameters, special characters of the password as %XX"
	var c *mysql.Config
	if driversOwn.MatchString(rest) {
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
		c.Timeout = quickly
	}
	c.Logger = &mysql.NopLogger{} // every error reaches a load
	return c, ""
}

// connect opens the database and creates what is missing, if it was asked for.
func (d *database) connect(ctx context.Context, withSwitch bool) (*sql.DB, error) {
	if d.file != "" && !d.create {
		if _, err := os.Stat(d.file); err != nil { // SQLite's own message says less
			return nil, fmt.Errorf("%w (--create-table creates it)", err)
		}
	}
	db, err := d.open()
	if err != nil {
		return nil, err
	}
	db.SetMaxOpenConns(4) // for the limits and the switch, and again if those hang
	db.SetConnMaxLifetime(5 * time.Minute)
	if d.create {
		err = sqlsource.CreateTable(ctx, db, d.dialect, d.options...)
		if err == nil {
			err = sqlsource.CreateAuditTable(ctx, db, d.dialect, d.options...)
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

// hinting adds to an error what an operator may do about it.
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

// misfits tells whether a database is there, and has tables of another shape than what is read or written.
func misfits(err error) bool {
	var my *mysql.MySQLError
	var pg *pgconn.PgError
	var lite *sqlite.Error
	switch {
	case errors.As(err, &my): // no such column, one without a default, or one that cannot hold it
		return slices.Contains([]uint16{1048, 1054, 1136, 1146, 1264, 1265, 1292, 1364, 1366, 1406, 3819, 4025}, my.Number)
	case errors.As(err, &pg): // classes: what a name means, values, constraints
		return len(pg.Code) == 5 && slices.Contains([]string{"42", "22", "23"}, pg.Code[:2])
	case errors.As(err, &lite):
		return slices.Contains([]int{1, 18, 19, 20}, lite.Code()&0xff) // ERROR, TOOBIG, CONSTRAINT, MISMATCH
	}
	return false
}

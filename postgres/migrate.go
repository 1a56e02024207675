package postgres

import (
	"context"
	"embed"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

//go:embed sql/*.sql
var migrations embed.FS

// version is the number of the newest migration. A released migration never changes, and functions have their version in their names: while
// a fleet is being updated, processes of the older release use the functions of theirs.
const version = 1

// migrationLock is the advisory lock under which processes migrate one after the other. It ends with the transaction.
const migrationLock = 0x746f6b656e62

// Migrate creates or updates the schema, in one transaction. Many processes may call it at once, each when it starts. If there is nothing
// to do, it reads one row, and needs no right but to read. It fails with [ErrNewer] if the schema is newer than this release. To create the
// schema it needs CREATE on the database, unless an empty one exists.
func Migrate(ctx context.Context, pool *pgxpool.Pool, opts ...Option) error {
	o, err := configure(pool, opts)
	if err != nil {
		return err
	}
	if err := migrate(ctx, pool, o.schema); err != nil {
		return fmt.Errorf("postgres: migrating schema %q: %w", o.schema, err)
	}
	return nil
}

// querier is a pool or a transaction.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

func migrate(ctx context.Context, pool *pgxpool.Pool, schema string) error {
	if at, err := migrated(ctx, pool, schema); err != nil || at == version {
		return err
	}
	return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", pgx.QueryExecModeExec, int64(migrationLock))
		if err != nil {
			return err
		}
		at, err := migrated(ctx, tx, schema)
		if err != nil || at == version { // another process was first
			return err
		}
		return steps(ctx, tx, schema, at)
	})
}

// migrated returns the version of the schema; 0 if there is none yet.
func migrated(ctx context.Context, q querier, schema string) (at int, err error) {
	var found bool // not by to_regclass, which does not see tables committed after this transaction began
	err = q.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = relnamespace "+
		"WHERE nspname = $1 AND relname = 'migrated')", pgx.QueryExecModeExec, schema).Scan(&found)
	if err != nil || !found {
		return 0, err
	}
	err = q.QueryRow(ctx, "SELECT max(version) FROM "+quoted(schema)+".migrated", pgx.QueryExecModeExec).Scan(&at)
	if err != nil {
		return 0, err
	}
	if at > version {
		return at, fmt.Errorf("%w: it has version %d, this release knows %d", ErrNewer, at, version)
	}
	return at, nil
}

// steps migrates the schema from a version to the newest.
func steps(ctx context.Context, tx pgx.Tx, schema string, from int) error {
	exec := func(sql string) error {
		_, err := tx.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
		return err
	}
	if from == 0 {
		var found bool // CREATE SCHEMA IF NOT EXISTS wants the right to create one, though it exists
		err := tx.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_catalog.pg_namespace WHERE nspname = $1)",
			pgx.QueryExecModeExec, schema).Scan(&found)
		if err == nil && !found {
			err = exec("CREATE SCHEMA " + quoted(schema))
		}
		if err != nil {
			return err
		}
	}
	if err := exec("SET LOCAL search_path = " + quoted(schema) + ", pg_temp"); err != nil {
		return err
	}
	if from == 0 {
		err := exec("CREATE TABLE migrated (version int PRIMARY KEY, at timestamptz NOT NULL DEFAULT clock_timestamp())")
		if err != nil {
			return err
		}
	}
	for v := from + 1; v <= version; v++ {
		text, err := migrations.ReadFile(fmt.Sprintf("sql/%d.sql", v))
		if err == nil {
			err = exec(string(text))
		}
		if err == nil {
			err = exec(fmt.Sprintf("INSERT INTO migrated (version) VALUES (%d)", v))
		}
		if err != nil {
			return fmt.Errorf("version %d: %w", v, err)
		}
	}
	return nil
}

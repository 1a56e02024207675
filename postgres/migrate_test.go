package postgres

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// TestMigrateAtOnce: many processes migrate at the same time, under a name that wants quoting.
func TestMigrateAtOnce(t *testing.T) {
	pool := pooled(t, dbtest.SharedPostgreSQL(t).DSN())
	schema := WithSchema(`a "B".c; -- ü`)
	var all sync.WaitGroup
	for range 12 {
		all.Go(func() { assert.NoError(t, Migrate(ctx, pool, schema)) })
	}
	all.Wait()
	s := newStore(t, pool, schema)
	require.EqualValues(t, version, value(t, s, "SELECT count(*) FROM %s.migrated"))
	require.NoError(t, Migrate(ctx, pool, schema))
	p, err := opens(t, s, "x", 1).Acquire(ctx, 1)
	require.NoError(t, err)
	require.NoError(t, p.Release(ctx))
}

func TestMigrateNewer(t *testing.T) {
	pool, schema := opened(t)
	s := newStore(t, pool, schema)
	exec(t, s, "INSERT INTO %s.migrated (version) VALUES (99)")
	err := Migrate(ctx, pool, schema)
	require.ErrorIs(t, err, ErrNewer)
	require.ErrorContains(t, err, "99")
	_, err = opens(t, s, "x", 1).TryAcquire(ctx, 1, 0)
	require.NoError(t, err, "an older process goes on")
}

// TestSchemaMissing: the error says what to do.
func TestSchemaMissing(t *testing.T) {
	pool := pooled(t, dbtest.SharedPostgreSQL(t).DSN())
	s := newStore(t, pool, WithSchema("nowhere"))
	sem := opens(t, s, "x", 1)
	_, err := sem.TryAcquire(ctx, 1, 0)
	require.ErrorIs(t, err, ErrSchema)
	require.ErrorContains(t, err, "call Migrate")
	_, err = sem.Holders(ctx)
	require.ErrorIs(t, err, ErrSchema)
	exec(t, s, "CREATE SCHEMA %s") // one that another user has created, empty
	_, err = sem.TryAcquire(ctx, 1, 0)
	require.ErrorIs(t, err, ErrSchema)
	require.NoError(t, Migrate(ctx, pool, WithSchema("nowhere")))
	got, err := sem.TryAcquire(ctx, 1, 0)
	require.NoError(t, err)
	require.NotNil(t, got)
}

// TestFewRights: a role that may only use the schema works, and may call Migrate when there is nothing to do.
func TestFewRights(t *testing.T) {
	admin, schema := opened(t)
	s := newStore(t, admin, schema)
	exec(t, s, `CREATE ROLE app LOGIN; GRANT USAGE ON SCHEMA %s TO app;
		GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA %s TO app`)
	app := pooled(t, dbtest.SharedPostgreSQL(t).DSN(), func(c *pgxpool.Config) { c.ConnConfig.User = "app" })
	require.NoError(t, Migrate(ctx, app, schema))
	p, err := opens(t, newStore(t, app, schema), "x", 1).Acquire(ctx, 1)
	require.NoError(t, err)
	require.NoError(t, p.Release(ctx))
	err = Migrate(ctx, app, WithSchema("not there"))
	require.Equal(t, "42501", code(err), "it may not create one: %v", err)
}

func TestBadInput(t *testing.T) {
	pool, schema := opened(t)
	for name, err := range map[string]error{
		"pool nil":   second(New(nil)),
		"option nil": second(New(pool, nil)),
		`schema ""`:  second(New(pool, WithSchema(""))),
		`"a\x00"`:    second(New(pool, WithSchema("a\x00"))),
		`"\xff"`:     second(New(pool, WithSchema("\xff"))),
		"63 bytes":   Migrate(ctx, pool, WithSchema(strings.Repeat("x", 64))),
		`"pg_x"`:     Migrate(ctx, pool, WithSchema("pg_x")),
	} {
		require.ErrorIs(t, err, ErrInvalidConfig)
		require.ErrorContains(t, err, name)
	}
	_, err := NewSemaphore(pool, "", 1)
	require.ErrorIs(t, err, semaphore.ErrInvalidConfig)
	_, err = NewSemaphore(nil, "x", 1)
	require.ErrorIs(t, err, ErrInvalidConfig)
	_, err = NewSemaphore(pool, "x", 0)
	require.ErrorIs(t, err, semaphore.ErrInvalidConfig)
	b := &semaphoreStore{store: newStore(t, pool, schema), name: "x"}
	long := strings.Repeat("é", 257)
	for _, batch := range []*store.Batch{
		{Process: long}, {Leave: []string{long}}, {Renew: []string{long}}, {Enter: []store.Entry{{ID: long}}},
	} {
		_, err = b.Apply(ctx, batch)
		require.ErrorIs(t, err, ErrInvalidConfig)
	}
}

func second[T any](_ T, err error) error { return err }

// TestNames: any name is one of its own, in a database of any encoding.
func TestNames(t *testing.T) {
	admin := pooled(t, dbtest.SharedPostgreSQL(t).DSN())
	exec(t, newStore(t, admin), "CREATE DATABASE latin ENCODING LATIN1 TEMPLATE template0 LOCALE 'C'")
	pool := pooled(t, dbtest.SharedPostgreSQL(t).DSN(), func(c *pgxpool.Config) { c.ConnConfig.Database = "latin" })
	require.NoError(t, Migrate(ctx, pool))
	hostile := []string{"a", "A", "a\x00", "%61", "a ", " a", "a\n", "'; DROP SCHEMA tokenbucket CASCADE; --", `"`, `\`, "{a}", "漢字",
		"\u00e9", "e\u0301", "NULL", strings.Repeat("漢", 170)}
	for i, name := range hostile {
		label := "label " + name
		sem, err := NewSemaphore(pool, name, 1, semaphore.WithLabel(label[:min(len(label), 20)]), semaphore.WithLease(time.Minute), semaphore.WithStoreTimeout(patient))
		if i == len(hostile)-1 {
			sem, err = NewSemaphore(pool, name, 1, semaphore.WithLease(time.Minute), semaphore.WithStoreTimeout(patient))
		}
		require.NoError(t, err)
		t.Cleanup(func() { closes(t, sem) })
		p, err := sem.TryAcquire(ctx, 1, 0)
		require.NoError(t, err)
		require.NotNil(t, p, "%q is another's name", name)
		holders, err := sem.Holders(ctx)
		require.NoError(t, err)
		require.Len(t, holders, 1)
		require.Equal(t, p.ID(), holders[0].ID)
		if i < len(hostile)-1 {
			require.Equal(t, label[:min(len(label), 20)], holders[0].Label)
		}
	}
}

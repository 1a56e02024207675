package postgres

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
	"github.com/go-tokenbucket/tokenbucket/storetest"
)

// buckets is a store of token buckets as another author would write it: a table of names and texts, and transactions that are repeated
// after a serialization failure.
type buckets struct {
	pool  *pgxpool.Pool
	again *atomic.Int64
}

// Apply implements tokenbucket.Store.
func (s *buckets) Apply(ctx context.Context, b *tokenbucket.Batch) error {
	for {
		err := pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error { return step(ctx, tx, b) })
		if e := (*pgconn.PgError)(nil); !errors.As(err, &e) || e.Code != "40001" && e.Code != "40P01" {
			return err
		}
		s.again.Add(1)
		time.Sleep(rand.N(5 * time.Millisecond))
	}
}

func step(ctx context.Context, tx pgx.Tx, b *tokenbucket.Batch) error {
	rows, err := tx.Query(ctx, `SELECT state FROM unnest($1::text[]) WITH ORDINALITY AS asked (name, number)
		LEFT JOIN bucket USING (name) ORDER BY number`, b.Names)
	if err != nil {
		return err
	}
	states, err := pgx.CollectRows(rows, pgx.RowTo[[]byte])
	if err != nil {
		return err
	}
	var now int64
	if err := tx.QueryRow(ctx, "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint").Scan(&now); err != nil {
		return err
	}
	next, ttl, err := b.Decide(now, states)
	if err != nil {
		return err
	}
	for i, name := range b.Names {
		if next[i] == nil {
			continue
		}
		if _, err := tx.Exec(ctx, `INSERT INTO bucket VALUES ($1, $2, now() + $3::interval)
			ON CONFLICT (name) DO UPDATE SET state = excluded.state, until = excluded.until`, name, string(next[i]), ttl); err != nil {
			return err
		}
	}
	return nil
}

// TestBuckets: a store that knows nothing of this library but Store and Batch passes what every store must.
func TestBuckets(t *testing.T) {
	t.Parallel()
	var again atomic.Int64
	storetest.Run(t, func(t *testing.T) func() tokenbucket.Store {
		schema := fmt.Sprint("buckets", names.Add(1))
		pool := pooled(t, dbtest.SharedPostgreSQL(t).DSN(), func(c *pgxpool.Config) {
			c.ConnConfig.RuntimeParams["search_path"] = schema
		})
		_, err := pool.Exec(ctx, "CREATE SCHEMA "+schema+"; CREATE TABLE "+schema+".bucket (name text COLLATE \"C\" PRIMARY KEY, state text, until timestamptz)")
		require.NoError(t, err)
		return func() tokenbucket.Store { return &buckets{pool, &again} }
	})
	t.Logf("%d transactions were tried again", again.Load())
	require.NotZero(t, again.Load(), "Decide was never called twice")
}

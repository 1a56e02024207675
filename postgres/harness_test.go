package postgres

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

func TestMain(m *testing.M) {
	code := m.Run()
	dbtest.StopShared()
	if code == 0 {
		code = leaks(time.Now().Add(time.Minute))
	}
	os.Exit(code)
}

// leaks is the exit code: 1 if there are goroutines left then. What closes connections may take a while.
func leaks(then time.Time) int {
	for {
		err := goleak.Find()
		if err == nil {
			return 0
		}
		if time.Now().After(then) {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	}
}

// patient is the store timeout of callers that must not mistake a slow machine for a fault.
const patient = 30 * time.Second

var (
	ctx   = context.Background()
	names atomic.Int64
)

// pooled returns a pool that is closed with the test, and changes its configuration before.
func pooled(t testing.TB, dsn string, change ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(dsn)
	require.NoError(t, err)
	config.MaxConns = 16
	for _, c := range change {
		c(config)
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

// opened returns a pool of the server that all tests share, and a schema of the test's own.
func opened(t testing.TB) (pool *pgxpool.Pool, schema Option) {
	t.Helper()
	pool = pooled(t, dbtest.SharedPostgreSQL(t).DSN())
	schema = WithSchema(fmt.Sprint("test ", names.Add(1)))
	require.NoError(t, Migrate(ctx, pool, schema))
	return pool, schema
}

// measureLateness measures how late this machine wakes those who sleep, at the worst, until it is asked.
func measureLateness(t testing.TB) func() time.Duration {
	stop, worst := make(chan struct{}), make(chan time.Duration, 1)
	go func() {
		const pause = time.Millisecond
		for most := time.Duration(0); ; {
			select {
			case <-stop:
				worst <- most
				return
			default:
			}
			began := time.Now()
			time.Sleep(pause)
			most = max(most, time.Since(began)-pause)
		}
	}()
	halt := sync.OnceValue(func() time.Duration { close(stop); return <-worst })
	t.Cleanup(func() { halt() })
	return halt
}

func newStore(t testing.TB, pool *pgxpool.Pool, opts ...Option) *Store {
	t.Helper()
	s, err := New(pool, opts...)
	require.NoError(t, err)
	return s
}

// exec runs statements; %s is the store's schema.
func exec(t testing.TB, s *Store, sql string, args ...any) {
	t.Helper()
	_, err := s.pool.Exec(ctx, strings.ReplaceAll(sql, "%s", s.schema), args...)
	require.NoError(t, err)
}

// value reads one number; %s is the store's schema.
func value(t testing.TB, s *Store, sql string, args ...any) (n int64) {
	t.Helper()
	require.NoError(t, s.pool.QueryRow(ctx, strings.ReplaceAll(sql, "%s", s.schema),
		append([]any{pgx.QueryExecModeExec}, args...)...).Scan(&n))
	return n
}

func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !done(); time.Sleep(5 * time.Millisecond) {
		require.True(t, time.Now().Before(deadline), what)
	}
}

func closes(t testing.TB, s *semaphore.Semaphore) {
	c, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	if err := s.Close(c); err != nil {
		t.Log(err)
	}
}

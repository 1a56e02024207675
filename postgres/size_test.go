package postgres

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// TestSize: the tables stay small under steady use, though no vacuum ever runs. TOKENBUCKET_ACQUISITIONS sets how much use.
func TestSize(t *testing.T) {
	t.Parallel()
	total := int64(20_000)
	if text := os.Getenv("TOKENBUCKET_ACQUISITIONS"); text != "" {
		n, err := strconv.ParseInt(text, 10, 64)
		require.NoError(t, err)
		total = n
	}
	server := dbtest.PostgreSQL(t, "-c", "autovacuum=off")
	pool := pooled(t, server.DSN())
	require.NoError(t, Migrate(ctx, pool))
	s := newStore(t, pool)

	size := func(at int64) (bytes int64) {
		var heap, index, dead, updated, hot, deleted int64
		require.NoError(t, pool.QueryRow(ctx, "SELECT sum(pg_table_size(relid)), sum(pg_indexes_size(relid)), sum(n_dead_tup), "+
			"sum(n_tup_upd), sum(n_tup_hot_upd), sum(n_tup_del) FROM pg_stat_user_tables WHERE relname LIKE 'semaphore%'").
			Scan(&heap, &index, &dead, &updated, &hot, &deleted))
		t.Logf("%8d acquisitions: tables %3d kB, indexes %3d kB; n_dead_tup %4d; %8d updates, %.2f %% HOT; %d deleted",
			at, heap>>10, index>>10, dead, updated, 100*float64(hot)/float64(max(1, updated)), deleted)
		return heap + index
	}
	size(0)
	var n, longest atomic.Int64
	var processes sync.WaitGroup
	began := time.Now()
	for range 4 {
		sem := opens(t, newStore(t, pool), "x", 10, semaphore.WithStoreTimeout(30*time.Second))
		for range 16 {
			processes.Go(func() {
				for n.Add(1) <= total {
					asked := time.Now()
					p, err := sem.Acquire(ctx, 1)
					if err == nil {
						longest.Store(max(longest.Load(), time.Since(asked).Milliseconds()))
						err = p.Release(ctx)
					}
					if err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
	}
	watch, stop := context.WithCancel(ctx)
	var watching sync.WaitGroup
	watching.Go(func() {
		for mark := total / 10; watch.Err() == nil; time.Sleep(time.Millisecond) {
			if n.Load() >= mark {
				size(mark)
				mark = total + 1000
			}
		}
	})
	processes.Wait()
	stop()
	watching.Wait()
	took := time.Since(began)
	time.Sleep(1500 * time.Millisecond) // statistics come late
	end := size(total)
	t.Logf("%.0f acquisitions/s; the longest wait %d ms; %d slots", float64(total)/took.Seconds(), longest.Load(),
		value(t, s, "SELECT slots FROM %s.semaphore_state"))
	require.Less(t, end, 1<<20+3*total, "bytes: a version is about 200, and there were four for each acquisition")
}

// TestOldSnapshot: a transaction that may still look at every version keeps the space of old ones from being reused, and
// would make each batch slower than the one before. The semaphore moves out of their way.
func TestOldSnapshot(t *testing.T) {
	pool, schema := opened(t)
	s := newStore(t, pool, schema)
	sem := opens(t, s, "x", 3)
	use := func(n int) {
		for range n {
			p, err := sem.Acquire(ctx, 1)
			require.NoError(t, err)
			require.NoError(t, p.Release(ctx))
		}
	}
	// read returns how many pages a pass over the slots reads.
	read := func() (pages int) {
		home := value(t, s, "SELECT id * 4294967296 + era FROM %s.semaphore")
		rows, err := pool.Query(ctx, "EXPLAIN (ANALYZE, BUFFERS) SELECT FROM "+s.schema+".semaphore_slot WHERE home = "+fmt.Sprint(home),
			pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
		lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		found := regexp.MustCompile(`Buffers: shared hit=(\d+)`).FindStringSubmatch(strings.Join(lines, "\n"))
		require.NotEmpty(t, found, lines)
		pages, err = strconv.Atoi(found[1])
		require.NoError(t, err)
		return pages
	}
	use(300)
	require.Zero(t, value(t, s, "SELECT era FROM %s.semaphore"), "no need to move")
	tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	_, err = tx.Exec(ctx, "SELECT 1")
	require.NoError(t, err)
	for range 5 {
		use(300)
		pages, moves := read(), value(t, s, "SELECT era FROM %s.semaphore")
		t.Log("pages read:", pages, "moves:", moves)
		require.Positive(t, moves)
		require.Less(t, pages, 40, "of old versions")
	}
}

// BenchmarkTryAcquire is one process that takes a permit and gives it back: two round trips.
func BenchmarkTryAcquire(b *testing.B) {
	pool, schema := opened(b)
	s := opens(b, newStore(b, pool, schema), "x", 1)
	for b.Loop() {
		p, err := s.TryAcquire(ctx, 1, 0)
		if err != nil || p == nil || p.Release(ctx) != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkManySlots is the same beside the given number of holders or waiters.
func BenchmarkManySlots(b *testing.B) {
	for _, many := range []int{100, 1000, 10_000} {
		b.Run(fmt.Sprint(many), func(b *testing.B) {
			pool, schema := opened(b)
			s := newStore(b, pool, schema)
			back := &semaphoreStore{store: s, name: "x"}
			for i := range many / 100 {
				batch := grab(fmt.Sprint(i))
				batch.Permits, batch.Enter = many+1, nil
				for j := range 100 {
					batch.Enter = append(batch.Enter, entry(fmt.Sprint(i, "-", j), 1)...)
				}
				batch.LeaseMicros = time.Hour.Microseconds()
				_, err := back.Apply(ctx, batch)
				require.NoError(b, err)
			}
			sem := opens(b, s, "x", many+1)
			for b.Loop() {
				p, err := sem.TryAcquire(ctx, 1, 0)
				if err != nil || p == nil || p.Release(ctx) != nil {
					b.Fatal(err, p)
				}
			}
		})
	}
}

package postgres

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/semaphoretest"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

func TestSemaphoreStore(t *testing.T) {
	t.Parallel()
	pool, schema := opened(t)
	testSemaphoreStore(t, pool, schema)
}

func testSemaphoreStore(t *testing.T, pool *pgxpool.Pool, schema Option) {
	semaphoretest.Store(t, func(t *testing.T) semaphoretest.Fixture {
		name := fmt.Sprint("store ", names.Add(1))
		s := newStore(t, pool, schema)
		return semaphoretest.Fixture{
			Process: func() store.Store { return &semaphoreStore{store: newStore(t, pool, schema), name: name} },
			SetBack: func(t *testing.T, d time.Duration) {
				home := value(t, s, "SELECT id * 4294967296 + era FROM %s.semaphore WHERE name = $1", encode(name))
				exec(t, s, "UPDATE %s.semaphore_state SET seen = seen + $2, earliest = CASE held WHEN 0 THEN 0 "+
					"ELSE earliest + $2 END WHERE home = $1", home, d.Microseconds())
				exec(t, s, "UPDATE %s.semaphore_slot SET until = until + $2, since = CASE kind WHEN 4 THEN since + $2 ELSE since END "+
					"WHERE home = $1 AND kind IN (1, 4)",
					home, d.Microseconds())
			},
		}
	})
}

func TestConformance(t *testing.T) {
	t.Parallel()
	pool, schema := opened(t)
	testConformance(t, pool, schema)
}

func testConformance(t *testing.T, pool *pgxpool.Pool, schema Option) {
	semaphoretest.Semaphore(t, func(t *testing.T, permits int, opts ...semaphore.Option) func() *semaphore.Semaphore {
		name := fmt.Sprint(t.Name(), " ", names.Add(1))
		return func() *semaphore.Semaphore { return opens(t, newStore(t, pool, schema), name, permits, opts...) }
	})
}

// opens a semaphore that is closed with the test. Its timeout is long: a machine may be busy.
func opens(t testing.TB, s *Store, name string, permits int, opts ...semaphore.Option) *semaphore.Semaphore {
	t.Helper()
	sem, err := s.Semaphore(name, permits, append([]semaphore.Option{semaphore.WithStoreTimeout(patient)}, opts...)...)
	require.NoError(t, err)
	t.Cleanup(func() { closes(t, sem) })
	return sem
}

package postgres

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

func entry(id string, permits int) []store.Entry {
	return []store.Entry{{ID: id, Permits: permits}}
}

// grab is a batch that takes one permit of one.
func grab(id string) *store.Batch {
	return &store.Batch{Process: "p", LeaseMicros: 60e6, Permits: 1, Enter: entry(id, 1)}
}

// TestLateBehindLock: the deadline counts when the row is ours, not when the batch was sent.
func TestLateBehindLock(t *testing.T) {
	pool, schema := opened(t)
	b := &semaphoreStore{store: newStore(t, pool, schema), name: "x"}
	_, err := b.Apply(ctx, grab("a"))
	require.NoError(t, err)
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	_, err = tx.Exec(ctx, "SELECT FROM "+b.store.schema+".semaphore FOR UPDATE")
	require.NoError(t, err)
	reports := make(chan *store.Report)
	clock := func() int64 {
		return value(t, b.store, "SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint")
	}
	deadline := clock() + 500_000
	go func() {
		batch := grab("b")
		batch.Deadline, batch.Leave = deadline, []string{"a"}
		r, _ := b.Apply(ctx, batch)
		reports <- r
	}()
	eventually(t, "it waits for the row", func() bool {
		return value(t, b.store, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE $1",
			"%"+b.store.schema+".semaphore_apply%") == 1
	})
	eventually(t, "its deadline", func() bool { return clock() > deadline })
	require.NoError(t, tx.Commit(ctx))
	r := <-reports
	require.True(t, r.Late)
	require.Greater(t, r.Now, deadline)
	holders, err := b.Holders(ctx)
	require.NoError(t, err)
	require.Equal(t, "a", holders[0].ID, "nothing was done")
}

// failing makes the first n batches fail on their way out with the code.
func failing(t *testing.T, s *Store, code string, n int) {
	exec(t, s, fmt.Sprintf(`CREATE SEQUENCE %%s.failed;
		CREATE FUNCTION %%s.fail() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF nextval('%[3]s.failed') <= %[2]d THEN
				RAISE EXCEPTION 'as the test wants' USING ERRCODE = '%[1]s';
			END IF;
			RETURN NEW;
		END $$;
		CREATE TRIGGER fail BEFORE UPDATE ON %%s.semaphore_state FOR EACH ROW EXECUTE FUNCTION %%s.fail()`, code, n, s.schema))
}

// TestTriesAgain: a statement that was certainly not executed is sent again until the deadline; other failures are errors.
func TestTriesAgain(t *testing.T) {
	for _, c := range []struct {
		code  string
		again bool
	}{{"40001", true}, {"40P01", true}, {"57014", true}, {"55P03", true}, {"22012", false}, {"53100", false}} {
		t.Run(c.code, func(t *testing.T) {
			pool, schema := opened(t)
			s := newStore(t, pool, schema)
			b := &semaphoreStore{store: s, name: "x"}
			failing(t, s, c.code, 3)
			r, err := b.Apply(ctx, grab("a"))
			if !c.again {
				require.Equal(t, c.code, code(err))
				require.EqualValues(t, 1, value(t, s, "SELECT last_value FROM %s.failed"))
				return
			}
			require.NoError(t, err)
			require.Equal(t, store.Granted, r.Entered[0].Outcome)
			require.EqualValues(t, 4, value(t, s, "SELECT last_value FROM %s.failed"))
			exec(t, s, "SELECT setval('%s.failed', 1); DROP TRIGGER fail ON %s.semaphore_state")
		})
	}
	t.Run("until the deadline", func(t *testing.T) {
		pool, schema := opened(t)
		s := newStore(t, pool, schema)
		failing(t, s, "40001", 1<<30)
		const most = 3 * time.Second
		c, cancel := context.WithTimeout(ctx, most)
		defer cancel()
		began := time.Now()
		_, err := (&semaphoreStore{store: s, name: "x"}).Apply(c, grab("a"))
		require.Error(t, err)
		require.GreaterOrEqual(t, time.Since(began), most/2)
		require.Less(t, time.Since(began), patient)
		require.Greater(t, value(t, s, "SELECT last_value FROM %s.failed"), int64(2))
	})
}

// TestTerminated: when its connection is cut in the middle of a batch, it is unknown what became of that: an error, and not
// sent again.
func TestTerminated(t *testing.T) {
	pool, schema := opened(t)
	s := newStore(t, pool, schema)
	b := &semaphoreStore{store: s, name: "x"}
	_, err := b.Apply(ctx, &store.Batch{Process: "p", LeaseMicros: 1, Permits: 1})
	require.NoError(t, err)
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	_, err = tx.Exec(ctx, "SELECT FROM "+s.schema+".semaphore FOR UPDATE")
	require.NoError(t, err)
	failed := make(chan error)
	go func() {
		_, err := b.Apply(ctx, grab("a"))
		failed <- err
	}()
	terminated := func() bool {
		return value(t, s, "SELECT count(*) FROM (SELECT pg_terminate_backend(pid) FROM pg_stat_activity "+
			"WHERE wait_event_type = 'Lock' AND query LIKE $1) x", "%"+s.schema+".semaphore_apply%") == 1
	}
	eventually(t, "no batch waits", terminated)
	require.Equal(t, "57P01", code(<-failed))
	require.NoError(t, tx.Commit(ctx))
	r, err := b.Apply(ctx, grab("b"))
	require.NoError(t, err)
	require.Equal(t, store.Granted, r.Entered[0].Outcome, "nobody has it")
}

// TestIsolation: a role whose transactions are serializable by default, read-committed all the same; at the price of
// three round trips.
func TestIsolation(t *testing.T) {
	_, schema := opened(t)
	for _, level := range []string{"serializable", "repeatable read"} {
		pool := pooled(t, dbtest.SharedPostgreSQL(t).DSN(), func(c *pgxpool.Config) {
			c.ConnConfig.RuntimeParams["default_transaction_isolation"] = level
		})
		s := opens(t, newStore(t, pool, schema), level, 4)
		var all sync.WaitGroup
		var failed atomic.Value
		for range 4 {
			other := opens(t, newStore(t, pool, schema), level, 4)
			all.Go(func() {
				for range 20 {
					if err := other.Do(ctx, func(context.Context) error { return nil }); err != nil {
						failed.Store(err)
					}
				}
			})
		}
		all.Wait()
		require.Nil(t, failed.Load())
		p, err := s.Acquire(ctx, 4)
		require.NoError(t, err)
		require.NoError(t, p.Release(ctx))
	}
}

// failures counts statements that failed with a code.
type failures struct {
	code string
	n    atomic.Int64
}

func (f *failures) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}

func (f *failures) TraceQueryEnd(_ context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	if code(data.Err) == f.code {
		f.n.Add(1)
	}
}

// TestIsolationIsRemembered: what a role's default is, is found out once, not by an error in the server's log for each batch.
func TestIsolationIsRemembered(t *testing.T) {
	_, schema := opened(t)
	refused := &failures{code: "TB001"}
	pool := pooled(t, dbtest.SharedPostgreSQL(t).DSN(), func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
		c.ConnConfig.Tracer = refused
	})
	s := newStore(t, pool, schema)
	for _, name := range []string{"a", "b"} {
		sem := opens(t, s, name, 1)
		for range 5 {
			require.NoError(t, sem.Do(ctx, func(context.Context) error { return nil }))
		}
	}
	require.EqualValues(t, 1, refused.n.Load())
}

// TestCommitIsDurable though the role's are not by default.
func TestCommitIsDurable(t *testing.T) {
	pool, schema := opened(t)
	s := newStore(t, pool, schema)
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(ctx) }()
	_, err = tx.Exec(ctx, "SET LOCAL synchronous_commit = off")
	require.NoError(t, err)
	b := &semaphoreStore{store: s, name: "x"}
	_, _, err = b.call(ctx, tx, b.arguments(grab("a")), grab("a"))
	require.NoError(t, err)
	var is string
	require.NoError(t, tx.QueryRow(ctx, "SHOW synchronous_commit").Scan(&is))
	require.Equal(t, "on", is)
}

// TestCorrupt: when counters and slots disagree, that is said and nothing is overwritten.
func TestCorrupt(t *testing.T) {
	for name, damage := range map[string]string{
		"slots missing":    "UPDATE %s.semaphore_state SET slots = slots + 5",
		"slots unknown":    "UPDATE %s.semaphore_state SET slots = 0, held = 0",
		"permits uncalled": "UPDATE %s.semaphore_state SET used = 0",
	} {
		t.Run(name, func(t *testing.T) {
			pool, schema := opened(t)
			s := newStore(t, pool, schema)
			sem := opens(t, s, "the name", 3)
			p, err := sem.Acquire(ctx, 1)
			require.NoError(t, err)
			_, err = sem.Acquire(ctx, 1)
			require.NoError(t, err)
			require.NotNil(t, p)
			exec(t, s, damage)
			before := value(t, s, "SELECT sum(fence + ticket + seen + slots + used) FROM %s.semaphore_state")
			_, err = (&semaphoreStore{store: s, name: "the name"}).Apply(ctx, &store.Batch{
				Process: "p", LeaseMicros: 1e6, Permits: 9, Leave: []string{p.ID()},
				Enter: append(entry("a", 1), entry("b", 1)...)})
			require.ErrorIs(t, err, semaphore.ErrCorruptState)
			require.ErrorContains(t, err, "the name")
			require.Equal(t, before, value(t, s, "SELECT sum(fence + ticket + seen + slots + used) FROM %s.semaphore_state"))
		})
	}
}

// TestSweep: a semaphore that was not used for a day is removed when others are created; one with holders is not.
func TestSweep(t *testing.T) {
	pool, schema := opened(t)
	s := newStore(t, pool, schema)
	for i := range 30 {
		_, err := (&semaphoreStore{store: s, name: fmt.Sprint(i)}).Apply(ctx, grab("a"))
		require.NoError(t, err)
	}
	day := 25 * time.Hour.Microseconds()
	exec(t, s, "UPDATE %s.semaphore_state SET seen = seen - $1, earliest = earliest - $1 WHERE home <> "+
		"(SELECT id * 4294967296 + era FROM %s.semaphore WHERE name = '7')", day)
	exec(t, s, "UPDATE %s.semaphore_slot SET until = until - $1 WHERE home NOT IN "+
		"(SELECT id * 4294967296 + era FROM %s.semaphore WHERE name IN ('7', '8'))", day)
	i := 0
	for ; value(t, s, "SELECT count(*) FROM %s.semaphore WHERE name < 'n'") > 2; i++ {
		require.Less(t, i, 500, "they stay")
		_, err := (&semaphoreStore{store: s, name: fmt.Sprint("n", i)}).Apply(ctx, &store.Batch{Process: "p", LeaseMicros: 1, Permits: 1})
		require.NoError(t, err)
	}
	require.EqualValues(t, i, value(t, s, "SELECT count(*) FROM %s.semaphore WHERE name > 'n'"), "the new ones stay")
	require.EqualValues(t, 15, value(t, s, "SELECT sum(name::int) FROM %s.semaphore WHERE name < 'n'"), "7 and 8 stay")
	require.EqualValues(t, 2, value(t, s, "SELECT count(*) FROM %s.semaphore_slot"))
}

// TestDeadProcesses: a process that died leaves nothing for good, though the semaphore is used all the time.
func TestDeadProcesses(t *testing.T) {
	pool, schema := opened(t)
	s := newStore(t, pool, schema)
	b := &semaphoreStore{store: s, name: "x"}
	come := func(process string) {
		_, err := b.Apply(ctx, &store.Batch{Process: process, LeaseMicros: 1, PatienceMicros: 1e6, AliveMicros: 1e6, Permits: 1})
		require.NoError(t, err)
	}
	for i := range 20 {
		come(fmt.Sprint(i))
	}
	exec(t, s, "UPDATE %s.semaphore_slot SET until = until - $1 WHERE id <> '7'", 2*time.Hour.Microseconds())
	come("new")
	require.EqualValues(t, 2, value(t, s, "SELECT processes FROM %s.semaphore_state"))
	require.EqualValues(t, 20, value(t, s, "SELECT count(*) FROM %s.semaphore_slot"), "it took the slot of another")
}

// TestListens: one connection for all semaphores of a store, which comes back when it was cut.
func TestListens(t *testing.T) {
	pool, schema := opened(t)
	s := newStore(t, pool, schema)
	const listener = " FROM pg_stat_activity WHERE query LIKE 'LISTEN \"tokenbucket_%'"
	listening := func() int64 { return value(t, s, "SELECT count(*)"+listener) }
	eventually(t, "another test's", func() bool { return listening() == 0 })
	var held, waiters []*semaphore.Semaphore
	var permits []*semaphore.Permit
	for i := range 5 {
		held = append(held, opens(t, newStore(t, pool, schema), fmt.Sprint(i), 1))
		p, err := held[i].Acquire(ctx, 1)
		require.NoError(t, err)
		permits = append(permits, p)
		waiters = append(waiters, opens(t, s, fmt.Sprint(i), 1))
	}
	var all sync.WaitGroup
	for _, w := range waiters {
		all.Go(func() {
			p, err := w.Acquire(ctx, 1)
			if err != nil || p.Release(ctx) != nil {
				t.Error("not admitted", err)
			}
		})
	}
	eventually(t, "nobody listens", func() bool { return listening() == 1 })
	first := value(t, s, "SELECT pid"+listener)
	exec(t, s, "SELECT pg_terminate_backend($1)", first)
	eventually(t, "nobody listens again", func() bool {
		return listening() == 1 && value(t, s, "SELECT count(*)"+listener+" AND pid <> $1", first) == 1
	})
	for _, p := range permits {
		require.NoError(t, p.Release(ctx))
	}
	all.Wait()
	require.LessOrEqual(t, listening(), int64(1))
	for _, w := range waiters {
		closes(t, w)
	}
	eventually(t, "it stays", func() bool { return listening() == 0 })
}

// TestManySlots: a queue of hundreds from processes of which some are dead, which empties in order; the slots that it
// took are given up.
func TestManySlots(t *testing.T) {
	pool, schema := opened(t)
	s := newStore(t, pool, schema)
	b := &semaphoreStore{store: s, name: "x"}
	apply := func(batch *store.Batch) *store.Report {
		t.Helper()
		batch.LeaseMicros = 60e6
		r, err := b.Apply(ctx, batch)
		require.NoError(t, err)
		return r
	}
	apply(&store.Batch{Process: "holder", Permits: 400, Enter: entry("h", 400)})
	const members, each = 7, 60
	for p := range members {
		batch := &store.Batch{Process: fmt.Sprint(p), Permits: 400, PatienceMicros: 60e6, AliveMicros: 60e6}
		if p%3 == 1 {
			batch.PatienceMicros = 1
		}
		for i := range each {
			batch.Enter = append(batch.Enter, store.Entry{ID: fmt.Sprint(p, "-", i), Permits: 1, Wait: true})
		}
		apply(batch)
	}
	r := apply(&store.Batch{Process: "0", Permits: 400, PatienceMicros: 60e6, AliveMicros: 60e6, Leave: []string{"h"}})
	require.Len(t, r.Grants, each)
	holders, err := b.Holders(ctx)
	require.NoError(t, err)
	require.Len(t, holders, 5*each)
	var ids []string
	for i, h := range holders {
		ids = append(ids, h.ID)
		p := []int{0, 2, 3, 5, 6}[i/each] // 1 and 4 are dead
		require.Equal(t, fmt.Sprint(p, "-", i%each), h.ID, "in the order of the queue")
	}
	require.EqualValues(t, each, apply(&store.Batch{Process: "6", Permits: 400, PatienceMicros: 60e6, AliveMicros: 60e6}).Notified)
	require.Greater(t, value(t, s, "SELECT slots FROM %s.semaphore_state"), int64(members*each))
	for chunk := range slices.Chunk(ids, 100) {
		r = apply(&store.Batch{Process: "0", Permits: 400, Leave: chunk})
		for _, standing := range r.Left {
			require.Equal(t, store.Holding, standing)
		}
	}
	slots := value(t, s, "SELECT slots FROM %s.semaphore_state")
	require.LessOrEqual(t, slots, int64(256))
	require.EqualValues(t, slots, value(t, s, "SELECT count(*) FROM %s.semaphore_slot"))
	apply(&store.Batch{Process: "0", Permits: 400, Enter: entry("z", 400)})
}

// perish lets a process die of which n wait for a permit that it held until just now.
func perish(t testing.TB, s *Store, name string, n int) {
	t.Helper()
	b := &semaphoreStore{store: s, name: name}
	_, err := b.Apply(ctx, &store.Batch{Process: "dead", LeaseMicros: 1, PatienceMicros: 1, Permits: 1, Enter: entry("held", 1)})
	require.NoError(t, err)
	exec(t, s, `INSERT INTO %s.semaphore_slot (home, slot, kind, id, permits, number, since, process)
		SELECT t.home, t.slots + i, 2, 'dead-' || i, 1, t.seen + i, t.seen, 'dead'
		FROM %s.semaphore_state t JOIN %s.semaphore ON home = id * 4294967296 + era, generate_series(1, $2) i WHERE name = $1`,
		encode(name), n)
	exec(t, s, `UPDATE %s.semaphore_state SET slots = slots + $2, queued = queued + $2, ticket = seen + $2
		WHERE home = (SELECT id * 4294967296 + era FROM %s.semaphore WHERE name = $1)`, encode(name), n)
}

// TestManyDead: waiters that have died, however many, do not keep others from being served within the time that calls have.
func TestManyDead(t *testing.T) {
	const dead = 30_000
	pool, schema := opened(t)
	s := newStore(t, pool, schema)
	perish(t, s, "x", dead)
	sem := opens(t, s, "x", 1, semaphore.WithStoreTimeout(time.Second)) // the default
	began, errs := time.Now(), 0
	var p *semaphore.Permit
	eventually(t, "nobody gets through", func() bool { // a slow machine may need several calls, but none is in vain
		var err error
		if p, err = sem.TryAcquire(ctx, 1, 0); err != nil && !errors.Is(err, semaphore.ErrRefused) {
			require.ErrorIs(t, err, semaphore.ErrStoreTimeout)
			errs++
		}
		return p != nil
	})
	t.Log(dead, "dead", time.Since(began), errs, "errors")
	require.Zero(t, value(t, s, "SELECT queued FROM %s.semaphore_state"))
	if err := p.Release(ctx); !errors.Is(err, semaphore.ErrStoreTimeout) {
		require.NoError(t, err)
	}
}

// TestSmallSteps runs the conformance suite with a function whose bounds are so small that every test crosses them.
func TestSmallSteps(t *testing.T) {
	pool, schema := opened(t)
	changed(t, newStore(t, pool, schema), [][2]string{{"{100, ", "{2, "}, {"s.slots > 256 AND ", ""},
		{"s.slots > 4 * busy", "s.slots > busy"}, {"2 * busy, 128", "busy, 0"},
		{"IF more > 8 + s.slots / 4 THEN", "IF random() < 0.3 THEN"}})
	testSemaphoreStore(t, pool, schema)
}

// changed replaces parts of semaphore_apply_1.
func changed(t *testing.T, s *Store, changes [][2]string) {
	t.Helper()
	var source string
	require.NoError(t, s.pool.QueryRow(ctx, "SELECT pg_get_functiondef(p.oid) FROM pg_proc p JOIN pg_namespace n ON n.oid = pronamespace "+
		"WHERE nspname = $1 AND proname = 'semaphore_apply_1'", strings.Trim(s.schema, `"`)).Scan(&source))
	for _, change := range changes {
		require.Contains(t, source, change[0])
		source = strings.Replace(source, change[0], change[1], 1)
	}
	exec(t, s, source)
}

// inParts are bounds at which nearly every batch is decided in several calls.
var inParts = [][2]string{{"{100, 10000}", "{2, 1}"}, {"s.slots > 256 AND ", ""}, {"2 * busy, 128, s.slots - 20000", "busy, s.slots - 3"}}

// TestConformanceInParts: a store whose calls go in small parts behaves the same.
func TestConformanceInParts(t *testing.T) {
	pool, schema := opened(t)
	changed(t, newStore(t, pool, schema), inParts)
	testConformance(t, pool, schema)
}

// TestLateInParts: when the deadline passes between two calls something was done, so it is an error, not Late.
func TestLateInParts(t *testing.T) {
	pool, schema := opened(t)
	s := newStore(t, pool, schema)
	changed(t, s, append([][2]string{{"a_deadline <> 0 AND", "a_set = 0 AND a_deadline <> 0 AND"}}, inParts...))
	perish(t, s, "x", 100)
	batch := grab("a")
	batch.Deadline, batch.SetPermits = 1, 1
	_, err := (&semaphoreStore{store: s, name: "x"}).Apply(ctx, batch)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.EqualValues(t, 97, value(t, s, "SELECT queued FROM %s.semaphore_state"), "the first call stays done")
}

// TestInParts: what several calls decide is what one would have decided.
func TestInParts(t *testing.T) {
	pool, whole := opened(t)
	parts := WithSchema(fmt.Sprint("test ", names.Add(1)))
	require.NoError(t, Migrate(ctx, pool, parts))
	changed(t, newStore(t, pool, parts), inParts)
	backs := []*semaphoreStore{{store: newStore(t, pool, whole), name: "x"}, {store: newStore(t, pool, parts), name: "x"}}
	rapid.Check(t, func(r *rapid.T) {
		for _, b := range backs {
			b.name = fmt.Sprint("x", names.Add(1))
		}
		tickets := [2]map[string]int64{{}, {}}
		ids, entries := []string{"none"}, map[string][]store.Entry{}
		for range rapid.IntRange(1, 12).Draw(r, "batches") {
			batch := &store.Batch{
				Process: rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(r, "process"), LeaseMicros: 3600e6, Permits: 3,
				PatienceMicros: rapid.SampledFrom([]int64{0, 1, 3600e6, 3600e6}).Draw(r, "patience"), // 1: it dies
				AliveMicros:    rapid.SampledFrom([]int64{1, 3600e6, 3600e6}).Draw(r, "alive"),       // 1: it is silent
				SetPermits:     rapid.SampledFrom([]int{0, 0, 0, 1, 2, 8, -1}).Draw(r, "set"),
				Leave:          rapid.SliceOfN(rapid.SampledFrom(ids), 0, 3).Draw(r, "leave"),
				Renew:          rapid.SliceOfN(rapid.SampledFrom(ids), 0, 2).Draw(r, "renew"),
			}
			for range rapid.IntRange(0, 5).Draw(r, "enters") {
				e := store.Entry{
					ID:      fmt.Sprint(batch.Process, len(ids)),
					Permits: rapid.SampledFrom([]int{0, 1, 1, 1, 2, 3}).Draw(r, "wants"), Wait: rapid.Bool().Draw(r, "wait"),
				}
				if mine := entries[batch.Process]; len(mine) > 0 && rapid.IntRange(0, 5).Draw(r, "known") == 0 {
					e = rapid.SampledFrom(mine).Draw(r, "again")
				}
				entries[batch.Process] = append(entries[batch.Process], e)
				ids = append(ids, e.ID)
				batch.Enter = append(batch.Enter, e)
			}
			var is [2]string
			for i, b := range backs {
				own := *batch
				own.Enter = slices.Clone(own.Enter)
				for j := range own.Enter {
					own.Enter[j].Ticket = tickets[i][own.Enter[j].ID]
				}
				got, err := b.Apply(ctx, &own)
				require.NoError(r, err)
				text := fmt.Sprint(got.Fresh, got.Permits, got.Notified, got.Earliest > 0, got.Left, got.Renewed, " entered")
				for j, a := range got.Entered {
					text += fmt.Sprint(" ", own.Enter[j].ID, a.Outcome, a.Fence > 0)
					tickets[i][own.Enter[j].ID] = a.Ticket
				}
				for _, g := range got.Grants {
					text += fmt.Sprint(" ", g.ID, g.Outcome, g.Fence > 0)
				}
				var rest string
				require.NoError(r, pool.QueryRow(ctx, strings.ReplaceAll(`SELECT concat_ws(' ', ' state', t.permits, used, held, queued, idle,
					processes, (SELECT string_agg(concat_ws('/', e.kind, e.id, e.permits), ' ' ORDER BY e.kind, e.number, e.id)
					FROM %s.semaphore_slot e WHERE e.home = t.home AND e.kind > 0))
					FROM %s.semaphore_state t JOIN %s.semaphore ON home = semaphore.id * 4294967296 + era WHERE name = $1`, "%s", b.store.schema),
					encode(b.name)).Scan(&rest))
				is[i] = text + rest
			}
			require.Equal(r, is[0], is[1], "batch %+v", batch)
		}
	})
}

// TestFaults cuts connections, stops the server, lets statements time out and kills the server, under load. A trigger in the
// database watches that there are never more holders than permits.
func TestFaults(t *testing.T) {
	t.Parallel()
	const permits, lease, limit = 3, time.Second, 400 * time.Millisecond
	const timeout, hang = 3 * time.Second, 4 * time.Second // longer than any call may take: its caller has no more than the limit
	late := measureLateness(t)
	server := dbtest.PostgreSQL(t)
	admin := pooled(t, server.DSN())
	require.NoError(t, Migrate(ctx, admin))
	s := newStore(t, admin)
	exec(t, s, fmt.Sprintf(`CREATE FUNCTION %%s.watch() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			IF (SELECT sum(permits) FROM %%s.semaphore_slot WHERE kind = 1) > %d THEN
				RAISE EXCEPTION 'overbooked';
			END IF;
			RETURN NULL;
		END $$;
		CREATE TRIGGER watch AFTER INSERT OR UPDATE ON %%s.semaphore_slot FOR EACH STATEMENT EXECUTE FUNCTION %%s.watch()`, permits))

	var mu sync.Mutex
	type hold struct {
		from, until time.Time
		permits     int
		fence       int64
	}
	var holds []hold
	failures := map[string]int{}
	var longest time.Duration
	load, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	for range 3 {
		pool := pooled(t, server.DSN(), func(c *pgxpool.Config) { c.MaxConns = 4 })
		sem := opens(t, newStore(t, pool), "x", permits, semaphore.WithLease(lease), semaphore.WithStoreTimeout(timeout))
		for g := range 4 {
			running.Go(func() {
				for load.Err() == nil {
					c, cancel := context.WithTimeout(ctx, limit)
					began := time.Now()
					p, err := sem.Acquire(c, 1+g%2)
					took := time.Since(began)
					cancel()
					mu.Lock()
					longest = max(longest, took)
					if err != nil {
						failures[kind(err)]++
					}
					mu.Unlock()
					if err != nil {
						time.Sleep(time.Millisecond)
						continue
					}
					h := hold{from: time.Now(), permits: p.Permits(), fence: p.Fence()}
					select {
					case <-p.Context().Done():
					case <-time.After(time.Duration(g) * 3 * time.Millisecond):
					}
					h.until = time.Now()
					c, cancel = context.WithTimeout(ctx, limit)
					began = time.Now()
					err = p.Release(c)
					took = time.Since(began)
					cancel()
					mu.Lock()
					longest = max(longest, took)
					holds = append(holds, h)
					if err != nil {
						failures[kind(err)]++
					}
					mu.Unlock()
				}
			})
		}
	}
	count := func() int { mu.Lock(); defer mu.Unlock(); return len(holds) }
	goesOn := func(what string) {
		t.Helper()
		n := count()
		eventually(t, "nobody is admitted any more after: "+what, func() bool { return count() > n+100 })
		mu.Lock()
		defer mu.Unlock()
		t.Logf("%-24s %5d holds, failures %v", what, len(holds), failures)
	}
	goesOn("nothing")
	for range 5 {
		_, err := admin.Exec(ctx, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "+
			"WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'")
		require.NoError(t, err)
		time.Sleep(20 * time.Millisecond) // they connect again meanwhile
	}
	goesOn("connections cut")
	require.NoError(t, server.Stop())
	time.Sleep(hang)
	require.NoError(t, server.Continue())
	goesOn("server stopped")
	exec(t, s, "ALTER ROLE postgres SET statement_timeout = '2ms'")
	exec(t, s, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'")
	time.Sleep(200 * time.Millisecond) // statements fail for that time
	eventually(t, "role", func() bool { _, err := admin.Exec(ctx, "ALTER ROLE postgres RESET ALL"); return err == nil })
	eventually(t, "cut", func() bool {
		_, err := admin.Exec(ctx, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'")
		return err == nil
	})
	goesOn("statement_timeout")
	for range 2 {
		server.Kill()
		time.Sleep(100 * time.Millisecond) // the database is down for that time
		require.NoError(t, server.Restart())
		goesOn("server killed")
	}
	cancel()
	running.Wait()

	worst := late()
	t.Logf("the longest call took %v; woken at most %v late", longest, worst)
	require.LessOrEqual(t, longest, limit+250*time.Millisecond+8*worst, "with a deadline of %v", limit)
	require.Zero(t, failures["overbooked"])
	type event struct {
		at      time.Time
		permits int
	}
	var events []event
	for _, h := range holds {
		events = append(events, event{h.from, h.permits}, event{h.until, -h.permits})
	}
	slices.SortFunc(events, func(a, b event) int { return a.at.Compare(b.at) })
	held, most := 0, 0
	var since time.Time
	var excess time.Duration
	for _, e := range events {
		if held > permits {
			excess = max(excess, e.at.Sub(since))
		} else {
			since = e.at
		}
		held += e.permits
		most = max(most, held)
	}
	require.GreaterOrEqual(t, most, permits, "so many were held at once, as the processes saw it")
	// A worker stops when another goroutine is woken by a timer and then wakes it: each may be late.
	require.LessOrEqual(t, excess, max(0, 3*worst-lease/10), "more for longer than this machine explains")
	last := opens(t, s, "x", permits, semaphore.WithLease(lease))
	c, cancelled := context.WithTimeout(ctx, 30*time.Second)
	defer cancelled()
	p, err := last.Acquire(c, permits)
	require.NoError(t, err, "what the faults left behind has an end")
	require.NoError(t, p.Release(c))
}

// kind sorts errors.
func kind(err error) string {
	for _, known := range []error{semaphore.ErrStoreTimeout, context.DeadlineExceeded, semaphore.ErrExpired, semaphore.ErrLost} {
		if errors.Is(err, known) {
			return known.Error()
		}
	}
	if strings.Contains(err.Error(), "overbooked") {
		return "overbooked"
	}
	if code := code(err); code != "" {
		return code
	}
	return "connection"
}

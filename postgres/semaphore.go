package postgres

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// semaphoreStore is the store of one semaphore.
type semaphoreStore struct {
	store *Store
	name  string
}

const maxID = 512 // bytes; escaped, an id must fit into a notification

// Apply implements store.Store by one call of a function: one round trip, in a transaction of its own. Statements are unnamed and the
// session has no other state, so it works through any proxy. Only a queue with thousands of waiters to admit or to drop takes several
// calls. Each of them is committed, so the work ends even if calls time out.
func (s *semaphoreStore) Apply(ctx context.Context, batch *store.Batch) (*store.Report, error) {
	for _, ids := range [][]string{{batch.Process}, batch.Leave, batch.Renew, entered(batch.Enter)} {
		for _, id := range ids {
			if len(id) > maxID {
				return nil, fmt.Errorf("%w: id %.80q of %d bytes: want at most %d", ErrInvalidConfig, id, len(id), maxID)
			}
		}
	}
	return batch.InSteps(func(rest *store.Batch) (*store.Report, bool, error) { return s.attempt(ctx, rest) })
}

// attempt makes one call, and repeats it if that may help. It returns unfinished if Enter needs another call.
func (s *semaphoreStore) attempt(ctx context.Context, batch *store.Batch) (r *store.Report, unfinished bool, err error) {
	args := s.arguments(batch)
	for p := shortestPause; ; {
		explicit := s.store.explicit.Load()
		r, unfinished, err = s.apply(ctx, explicit, args, batch)
		switch {
		case err == nil:
			return r, unfinished, nil
		case code(err) == "TB001" && !explicit: // the default isolation of the role or the database is another
			s.store.explicit.Store(true)
		case !notExecuted(err) || !p.wait(ctx):
			return nil, false, s.explained(err)
		}
	}
}

func entered(entries []store.Entry) []string {
	ids := make([]string, len(entries))
	for i, e := range entries {
		ids[i] = e.ID
	}
	return ids
}

// arguments returns the arguments of semaphore_apply_1.
func (s *semaphoreStore) arguments(batch *store.Batch) []any {
	n := len(batch.Enter)
	wants, tickets, waits, labels := make([]int64, n), make([]int64, n), make([]bool, n), make([]string, n)
	for i, e := range batch.Enter {
		wants[i], tickets[i], waits[i], labels[i] = int64(e.Permits), e.Ticket, e.Wait, e.Label
	}
	return []any{
		pgx.QueryExecModeExec,
		encode(s.name), encode(batch.Process), encode(batch.Label), s.channel(batch.Process),
		batch.LeaseMicros, batch.PatienceMicros, batch.AliveMicros, int64(batch.Permits), int64(batch.Limit.Permits),
		batch.Limit.Version, int64(batch.SetPermits), int64(batch.AddPermits), batch.Deadline,
		encodeAll(batch.Leave), encodeAll(batch.Renew), encodeAll(entered(batch.Enter)), wants, tickets, waits, encodeAll(labels),
	}
}

func (s *semaphoreStore) apply(
	ctx context.Context, explicit bool, args []any, batch *store.Batch,
) (r *store.Report, unfinished bool, err error) {
	if !explicit {
		return s.call(ctx, s.store.pool, args, batch)
	}
	err = pgx.BeginTxFunc(ctx, s.store.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) (err error) {
		r, unfinished, err = s.call(ctx, tx, args, batch)
		return err
	})
	return r, unfinished, err
}

func (s *semaphoreStore) call(
	ctx context.Context, q querier, args []any, batch *store.Batch,
) (r *store.Report, unfinished bool, err error) {
	const columns = "at, late, fresh, total, earliest, told, limited, version, unchanged, standings, renewed, unfinished, " +
		"outcomes, fences, places, grants"
	sql := "SELECT " + columns + " FROM " + s.store.schema + ".semaphore_apply_1(" +
		"$1::text, $2::text, $3::text, $4::text, $5::bigint, $6::bigint, $7::bigint, $8::bigint, $9::bigint, $10::bigint, " +
		"$11::bigint, $12::bigint, $13::bigint, $14::text[], $15::text[], $16::text[], $17::bigint[], $18::bigint[], " +
		"$19::boolean[], $20::text[])"
	var out store.Report
	var standings, outcomes []int32
	var fences, places []int64
	var grants []string
	err = q.QueryRow(ctx, sql, args...).Scan(&out.Now, &out.Late, &out.Fresh, &out.Permits, &out.Earliest, &out.Notified,
		&out.Limit.Permits, &out.Limit.Version, &out.Unchanged, &standings, &out.Renewed, &unfinished, &outcomes, &fences, &places, &grants)
	if err != nil || out.Late {
		return &out, false, err
	}
	n := len(batch.Enter)
	if unfinished {
		n = 0
	}
	if len(standings) != len(batch.Leave) || len(out.Renewed) != len(batch.Renew) ||
		len(outcomes) != n || len(fences) != n || len(places) != n {
		return nil, false, fmt.Errorf("%w: unexpected report", semaphore.ErrCorruptState)
	}
	for _, standing := range standings {
		out.Left = append(out.Left, store.Standing(standing))
	}
	for i := range outcomes {
		out.Entered = append(out.Entered, store.Result{
			Outcome: store.Outcome(outcomes[i]), Fence: fences[i], Ticket: places[i],
		})
	}
	for _, text := range grants {
		g, ok := parseGrant(text)
		if !ok {
			return nil, false, fmt.Errorf("%w: unexpected grant %.80q", semaphore.ErrCorruptState, text)
		}
		out.Grants = append(out.Grants, g)
	}
	return &out, unfinished, nil
}

// Holders implements store.Store.
func (s *semaphoreStore) Holders(ctx context.Context) ([]store.Holder, error) {
	rows, err := s.store.pool.Query(ctx, "SELECT id, permits, fence, since, expires, label FROM "+
		s.store.schema+".semaphore_holders_1($1::text)", pgx.QueryExecModeExec, encode(s.name))
	if err != nil {
		return nil, s.explained(err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (h store.Holder, err error) {
		var since, expires int64
		err = row.Scan(&h.ID, &h.Permits, &h.Fence, &since, &expires, &h.Label)
		h.ID, h.Label = decode(h.ID), decode(h.Label)
		h.Since, h.Expires = time.UnixMicro(since), time.UnixMicro(expires)
		return h, err
	})
	return all, s.explained(err)
}

// Stats implements store.Store.
func (s *semaphoreStore) Stats(ctx context.Context) (store.Stats, error) {
	var stats store.Stats
	err := s.store.pool.QueryRow(ctx, "SELECT permits, version, used, waiting FROM "+s.store.schema+".semaphore_stats_1($1::text)",
		pgx.QueryExecModeExec, encode(s.name)).Scan(&stats.Permits, &stats.Version, &stats.Used, &stats.Waiting)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil // it was never used
	}
	return stats, s.explained(err)
}

// Listen implements store.Store. All semaphores of a store share one connection.
func (s *semaphoreStore) Listen(ctx context.Context, process string, ready func(), wake func(store.Grant)) error {
	e := s.store.listener.join(s.channel(process))
	defer s.store.listener.leave(e)
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-e.ready:
		}
		begun, news, err := e.take()
		if begun {
			ready()
		}
		for _, text := range news {
			if g, ok := parseGrant(text); ok && ctx.Err() == nil {
				wake(g)
			}
		}
		if err != nil {
			return s.explained(err)
		}
	}
}

// channel returns the channel on which the process receives grants of this semaphore. Channels belong to the whole database, and have at
// most 63 bytes.
func (s *semaphoreStore) channel(process string) string {
	sum := sha256.Sum256([]byte(strings.Join([]string{s.store.schema, encode(s.name), encode(process)}, " ")))
	return "tokenbucket_" + hex.EncodeToString(sum[:20])
}

// parseGrant decodes 'id outcome fence expires'.
func parseGrant(text string) (g store.Grant, ok bool) {
	fields := strings.Fields(text)
	if len(fields) != 4 {
		return g, false
	}
	outcome, err1 := strconv.ParseUint(fields[1], 10, 8)
	fence, err2 := strconv.ParseInt(fields[2], 10, 64)
	expires, err3 := strconv.ParseInt(fields[3], 10, 64)
	g = store.Grant{ID: decode(fields[0]), Outcome: store.Outcome(outcome), Fence: fence, Expires: expires}
	return g, err1 == nil && err2 == nil && err3 == nil
}

// encode returns any bytes as printable ASCII without spaces, which a database of any encoding can store. Names are encoded as in the keys
// of Redis, and bytes beyond ASCII as well.
func encode(s string) string {
	isPlain := func(c byte) bool { return c > ' ' && c < 0x7f && c != '%' && c != '{' && c != '}' }
	var b strings.Builder
	for i := range len(s) {
		if isPlain(s[i]) {
			b.WriteByte(s[i])
		} else {
			fmt.Fprintf(&b, "%%%02X", s[i])
		}
	}
	return b.String()
}

func encodeAll(all []string) []string {
	out := make([]string, len(all)) // never nil: pgx sends nil as NULL
	for i, s := range all {
		out[i] = encode(s)
	}
	return out
}

// decode reverses encode.
func decode(s string) string {
	if plain, err := url.PathUnescape(s); err == nil {
		return plain
	}
	return s
}

// code returns the SQLSTATE of an error of the server; "" for other errors.
func code(err error) string {
	if e := new(pgconn.PgError); errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// notExecuted reports whether the transaction was certainly undone or never begun, and may succeed if it is repeated.
func notExecuted(err error) bool {
	switch code(err) {
	case "40001", "40P01": // serialization failure, deadlock
		return true
	case "55P03", "57014": // lock_timeout, statement_timeout: shorter than what the caller allows
		return true
	}
	return pgconn.SafeToRetry(err) // nothing was sent
}

// explained returns err with the semaphore's error that it means: the store is unavailable, the schema is missing, or the state is corrupt.
// Package semaphore classifies errors of the connection itself.
func (s *semaphoreStore) explained(err error) error {
	switch code(err) {
	case "3F000", "42883", "42P01": // no such schema, function, table
		return fmt.Errorf("%w (schema %s): %w", ErrSchema, s.store.schema, err)
	case "TB002", "23505", "23514": // counters and slots disagree, and what follows from that
		return fmt.Errorf("%w: schema %s, table semaphore, name %.80q: %w", semaphore.ErrCorruptState, s.store.schema, s.name, err)
	case "25006", // a standby, or read-only for another reason
		"53100", "53200", "53300", // no space, memory or connection left
		"57P01", "57P02", "57P03", // shutting down, crashed or starting
		"55P03", "57014": // lock_timeout, statement_timeout
		return fmt.Errorf("%w: %w", semaphore.ErrStoreUnavailable, err)
	}
	return err
}

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
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// backend keeps one semaphore: semaphore.Backend.
type backend struct {
	store *Store
	name  string
}

const maxID = 512 // bytes; escaped, an id must fit into a notification

// Apply implements semaphore.Backend: one call of a function, one round trip, which is its own transaction. Statements are
// unnamed and there is no other state of the session, so any proxy will do. Only a queue with thousands to admit or to drop
// takes several: each stays done, so there is an end to it even when calls run out of time.
func (b *backend) Apply(ctx context.Context, batch *semaphore.Batch) (*semaphore.Report, error) {
	for _, ids := range [][]string{{batch.Process}, batch.Leave, batch.Renew, entered(batch.Enter)} {
		for _, id := range ids {
			if len(id) > maxID {
				return nil, fmt.Errorf("%w: id %.80q of %d bytes: want at most %d", ErrInvalid, id, len(id), maxID)
			}
		}
	}
	return batch.InSteps(func(rest *semaphore.Batch) (*semaphore.Report, bool, error) { return b.attempt(ctx, rest) })
}

// attempt makes one call, again if need be; unfinished: Enter wants another.
func (b *backend) attempt(ctx context.Context, batch *semaphore.Batch) (r *semaphore.Report, unfinished bool, err error) {
	args := b.arguments(batch)
	for pause := script.NewPause(); ; {
		explicit := b.store.explicit.Load()
		r, unfinished, err = b.apply(ctx, explicit, args, batch)
		switch {
		case err == nil:
			return r, unfinished, nil
		case code(err) == "TB001" && !explicit: // the role's or the database's default is another isolation
			b.store.explicit.Store(true)
		case !notExecuted(err) || !pause.Wait(ctx):
			return nil, false, b.explained(err)
		}
	}
}

func entered(entries []semaphore.Entry) []string {
	ids := make([]string, len(entries))
	for i, e := range entries {
		ids[i] = e.ID
	}
	return ids
}

// arguments are those of semaphore_apply_1.
func (b *backend) arguments(batch *semaphore.Batch) []any {
	n := len(batch.Enter)
	wants, tickets, waits, labels := make([]int64, n), make([]int64, n), make([]bool, n), make([]string, n)
	for i, e := range batch.Enter {
		wants[i], tickets[i], waits[i], labels[i] = int64(e.Permits), e.Ticket, e.Wait, e.Label
	}
	return []any{
		pgx.QueryExecModeExec,
		encode(b.name), encode(batch.Process), encode(batch.Label), b.channel(batch.Process),
		batch.LeaseMicros, batch.PatienceMicros, batch.AliveMicros, int64(batch.Permits), int64(batch.Limit.Permits),
		batch.Limit.Version, int64(batch.SetPermits), int64(batch.AddPermits), batch.Deadline,
		encodeAll(batch.Leave), encodeAll(batch.Renew), encodeAll(entered(batch.Enter)), wants, tickets, waits, encodeAll(labels),
	}
}

func (b *backend) apply(
	ctx context.Context, explicit bool, args []any, batch *semaphore.Batch,
) (r *semaphore.Report, unfinished bool, err error) {
	if !explicit {
		return b.call(ctx, b.store.pool, args, batch)
	}
	err = pgx.BeginTxFunc(ctx, b.store.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) (err error) {
		r, unfinished, err = b.call(ctx, tx, args, batch)
		return err
	})
	return r, unfinished, err
}

func (b *backend) call(
	ctx context.Context, q querier, args []any, batch *semaphore.Batch,
) (r *semaphore.Report, unfinished bool, err error) {
	const columns = "at, late, fresh, total, earliest, told, limited, version, unchanged, standings, renewed, unfinished, " +
		"outcomes, fences, places, grants"
	sql := "SELECT " + columns + " FROM " + b.store.schema + ".semaphore_apply_1(" +
		"$1::text, $2::text, $3::text, $4::text, $5::bigint, $6::bigint, $7::bigint, $8::bigint, $9::bigint, $10::bigint, " +
		"$11::bigint, $12::bigint, $13::bigint, $14::text[], $15::text[], $16::text[], $17::bigint[], $18::bigint[], " +
		"$19::boolean[], $20::text[])"
	var out semaphore.Report
	var standings, outcomes []int32
	var fences, places []int64
	var grants []string
	err = q.QueryRow(ctx, sql, args...).Scan(&out.Now, &out.Late, &out.Fresh, &out.Permits, &out.Earliest, &out.Told,
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
		return nil, false, fmt.Errorf("%w: unexpected report", semaphore.ErrCorrupt)
	}
	for _, standing := range standings {
		out.Left = append(out.Left, semaphore.Standing(standing))
	}
	for i := range outcomes {
		out.Entered = append(out.Entered, semaphore.Answer{
			Outcome: semaphore.Outcome(outcomes[i]), Fence: fences[i], Ticket: places[i],
		})
	}
	for _, text := range grants {
		g, ok := parseGrant(text)
		if !ok {
			return nil, false, fmt.Errorf("%w: unexpected grant %.80q", semaphore.ErrCorrupt, text)
		}
		out.Grants = append(out.Grants, g)
	}
	return &out, unfinished, nil
}

// Holders implements semaphore.Backend.
func (b *backend) Holders(ctx context.Context) ([]semaphore.Holder, error) {
	rows, err := b.store.pool.Query(ctx, "SELECT id, permits, fence, since, expires, label FROM "+
		b.store.schema+".semaphore_holders_1($1::text)", pgx.QueryExecModeExec, encode(b.name))
	if err != nil {
		return nil, b.explained(err)
	}
	all, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (h semaphore.Holder, err error) {
		var since, expires int64
		err = row.Scan(&h.ID, &h.Permits, &h.Fence, &since, &expires, &h.Label)
		h.ID, h.Label = decode(h.ID), decode(h.Label)
		h.Since, h.Expires = time.UnixMicro(since), time.UnixMicro(expires)
		return h, err
	})
	return all, b.explained(err)
}

// Stats implements semaphore.Backend.
func (b *backend) Stats(ctx context.Context) (semaphore.Stats, error) {
	var s semaphore.Stats
	err := b.store.pool.QueryRow(ctx, "SELECT permits, version, used, waiting FROM "+b.store.schema+".semaphore_stats_1($1::text)",
		pgx.QueryExecModeExec, encode(b.name)).Scan(&s.Permits, &s.Version, &s.Used, &s.Waiting)
	if errors.Is(err, pgx.ErrNoRows) {
		err = nil // nobody has used it yet
	}
	return s, b.explained(err)
}

// Listen implements semaphore.Backend. All semaphores of a store share one connection.
func (b *backend) Listen(ctx context.Context, process string, ready func(), wake func(semaphore.Grant)) error {
	e := b.store.listener.join(b.channel(process))
	defer b.store.listener.leave(e)
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
			return b.explained(err)
		}
	}
}

// channel is where the process is told of this semaphore: channels are the whole database's, and of at most 63 bytes.
func (b *backend) channel(process string) string {
	sum := sha256.Sum256([]byte(strings.Join([]string{b.store.schema, encode(b.name), encode(process)}, " ")))
	return "tokenbucket_" + hex.EncodeToString(sum[:20])
}

// parseGrant reads 'id outcome fence expires'.
func parseGrant(text string) (g semaphore.Grant, ok bool) {
	fields := strings.Fields(text)
	if len(fields) != 4 {
		return g, false
	}
	outcome, err1 := strconv.ParseUint(fields[1], 10, 8)
	fence, err2 := strconv.ParseInt(fields[2], 10, 64)
	expires, err3 := strconv.ParseInt(fields[3], 10, 64)
	g = semaphore.Grant{ID: decode(fields[0]), Outcome: semaphore.Outcome(outcome), Fence: fence, Expires: expires}
	return g, err1 == nil && err2 == nil && err3 == nil
}

// encode writes any bytes as printable ASCII without spaces, which a database of any encoding holds.
func encode(s string) string {
	s = script.EncodeName(s)
	if strings.IndexFunc(s, func(r rune) bool { return r >= utf8.RuneSelf }) < 0 {
		return s
	}
	var b strings.Builder
	for i := range len(s) {
		if s[i] < utf8.RuneSelf {
			b.WriteByte(s[i])
		} else {
			fmt.Fprintf(&b, "%%%02X", s[i])
		}
	}
	return b.String()
}

func encodeAll(all []string) []string {
	out := make([]string, len(all)) // never nil: that were NULL
	for i, s := range all {
		out[i] = encode(s)
	}
	return out
}

// decode undoes encode.
func decode(s string) string {
	if plain, err := url.PathUnescape(s); err == nil {
		return plain
	}
	return s
}

// code of an error that the server reports; empty: it is another.
func code(err error) string {
	if e := new(pgconn.PgError); errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// notExecuted tells whether the transaction was certainly undone, or never begun, and may do better next time.
func notExecuted(err error) bool {
	switch code(err) {
	case "40001", "40P01": // serialization failure, deadlock
		return true
	case "55P03", "57014": // lock_timeout, statement_timeout: shorter than what the caller allows
		return true
	}
	return pgconn.SafeToRetry(err) // the connection was dead before
}

// explained says what to do about errors of the schema and the state.
func (b *backend) explained(err error) error {
	switch code(err) {
	case "3F000", "42883", "42P01": // no such schema, function, table
		return fmt.Errorf("%w (schema %s): %w", ErrSchema, b.store.schema, err)
	case "TB002", "23505", "23514": // counters and slots disagree, and what follows from that
		return fmt.Errorf("%w: schema %s, table semaphore, name %.80q: %w", semaphore.ErrCorrupt, b.store.schema, b.name, err)
	}
	return err
}

package editor

import (
	"cmp"
	"context"
	"crypto/sha256"
	"database/sql"
	"database/sql/driver"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// session is one transaction of an Editor, or reading without one.
type session struct {
	*Editor
	q       sqlsource.Querier
	tx      *sql.Tx // nil without locks
	columns layout
}

const (
	// turnWait bounds the wait for a turn, unless the context ends earlier.
	turnWait = 5 * time.Second
	// lockWait bounds the wait for a row that another transaction has locked.
	lockWait = 2 * time.Second
)

// turn serialises transactions of this process.
type turn chan struct{}

// take waits for the turn, without holding a connection.
func (t turn) take(ctx context.Context) error {
	timer := time.NewTimer(turnWait)
	defer timer.Stop()
	select {
	case t <- struct{}{}:
		return nil
	case <-timer.C:
		return fmt.Errorf("%w: another change by this process is in progress", ErrLocked)
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (t turn) leave() { <-t }

// transact calls do in a transaction. Editors of one table take turns, so that two of them do not add the same row.
func (e *Editor) transact(ctx context.Context, do func(*session) error) error {
	d := e.dialect
	if err := e.changes.take(ctx); err != nil {
		return e.failed("change", e.table, err)
	}
	defer e.changes.leave()
	if err := e.audited(ctx); err != nil {
		return err
	}
	conn, err := e.db.Conn(ctx)
	if err != nil {
		return e.failed("begin a change of", e.table, err)
	}
	defer func() { _ = conn.Close() }()
	if d == sqlsource.MySQL {
		if err := e.transactional(ctx, conn); err != nil {
			return err
		}
		free, err := e.turn(ctx, conn)
		if err != nil {
			return err
		}
		defer free()
		unbind, err := e.boundLocks(ctx, conn)
		if err != nil {
			return err
		}
		defer unbind()
	}
	var isolation sql.TxOptions
	if d == sqlsource.PostgreSQL {
		isolation.Isolation = sql.LevelReadCommitted
	}
	tx, err := conn.BeginTx(ctx, &isolation)
	if err != nil {
		return e.failed("begin a change of", e.table, err)
	}
	defer func() { _ = tx.Rollback() }() // has no effect after Commit
	s := &session{Editor: e, q: tx, tx: tx}
	switch d {
	case sqlsource.PostgreSQL:
		if err = s.waitForLocks(ctx, turnWait); err == nil {
			_, err = s.exec(ctx, "lock", e.table, fmt.Sprintf("SELECT pg_advisory_xact_lock(%d, hashtext($1::text))", turnLock), e.table.String())
		}
		if err == nil {
			err = s.waitForLocks(ctx, lockWait)
		}
	case sqlsource.SQLite: // a transaction that reads before it writes can fail with SQLITE_BUSY
		_, err = s.exec(ctx, "INSERT", e.audit, "DELETE FROM "+d.QuoteTable(e.audit)+" WHERE 0")
	}
	if err == nil {
		err = s.prepare(ctx)
	}
	if err == nil {
		err = do(s)
	}
	if err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return e.failed("commit a change of", e.table, err)
	}
	return nil
}

// transactional returns an error if a table of MySQL has an engine without transactions, such as MyISAM.
func (e *Editor) transactional(ctx context.Context, q sqlsource.Querier) error {
	for _, t := range []sqlsource.TableName{e.table, e.audit} {
		schema := "DATABASE()"
		if t.Schema != "" {
			schema = "'" + t.Schema + "'"
		}
		s := &session{Editor: e, q: q}
		engines, err := s.query(ctx, "SELECT", t, "SELECT t.ENGINE FROM information_schema.TABLES AS t JOIN information_schema.ENGINES AS e ON e.ENGINE = t.ENGINE"+
			" WHERE t.TABLE_SCHEMA = "+schema+" AND t.TABLE_NAME = '"+t.Name+"' AND e.TRANSACTIONS = 'NO'")
		if err == nil && len(engines) > 0 {
			err = fmt.Errorf("its engine, %s, has no transactions", plainValue(engines[0][0]))
		}
		if err != nil {
			return e.failed("change", t, err)
		}
	}
	return nil
}

// turnLock is the first half of the key of an advisory lock.
const turnLock = 0x746f6b65 // "toke"

// turn waits for a lock of MySQL, which belongs to a connection and not to a transaction. It comes before the transaction's
// first read, which then sees everything that the previous holder committed.
func (e *Editor) turn(ctx context.Context, conn *sql.Conn) (free func(), err error) {
	const name = "CONCAT('tokenbucket ', SHA1(CONCAT(COALESCE(DATABASE(), ''), '.', ?)))" // at most 64 letters
	var got sql.NullInt64
	table := e.table.String()
	err = conn.QueryRowContext(ctx, "SELECT GET_LOCK("+name+", ?)", table, int(turnWait/time.Second)).Scan(&got)
	if err != nil {
		return nil, e.failed("lock", e.table, err)
	}
	if got.Int64 != 1 {
		return nil, e.failed("lock", e.table, fmt.Errorf("%w: another editor changes the table", ErrLocked))
	}
	return func() { undo(ctx, conn, "DO RELEASE_LOCK("+name+")", table) }, nil
}

// boundLocks bounds the time that the statements of a MySQL connection wait for locks on rows and tables.
func (e *Editor) boundLocks(ctx context.Context, conn *sql.Conn) (unbind func(), err error) {
	const set = "SET SESSION innodb_lock_wait_timeout = %[1]s, SESSION lock_wait_timeout = %[1]s"
	if _, err := conn.ExecContext(ctx, fmt.Sprintf(set, fmt.Sprint(int(lockWait/time.Second)))); err != nil {
		return nil, e.failed("lock", e.table, err)
	}
	return func() { undo(ctx, conn, fmt.Sprintf(set, "DEFAULT")) }, nil
}

// undo resets a connection with a statement, or closes it if that fails.
func undo(ctx context.Context, conn *sql.Conn, statement string, args ...any) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if _, err := conn.ExecContext(ctx, statement, args...); err != nil {
		_ = conn.Raw(func(any) error { return driver.ErrBadConn })
	}
}

// waitForLocks bounds the time that the statements of a PostgreSQL transaction wait for a lock.
func (s *session) waitForLocks(ctx context.Context, d time.Duration) error {
	_, err := s.tx.ExecContext(ctx, fmt.Sprintf("SET LOCAL lock_timeout = %d", d.Milliseconds()))
	return s.failed("lock", s.table, err)
}

// prepare reads the columns of the table. Columns of the source get the names configured there.
func (s *session) prepare(ctx context.Context) error {
	l, err := s.layoutOf(ctx, s.table)
	if err != nil {
		return err
	}
	d := s.dialect
	for _, name := range s.source.MayRead() {
		for i := range l {
			if d != sqlsource.PostgreSQL && strings.EqualFold(l[i].name, name) {
				l[i].name = name
			}
		}
	}
	s.columns = l
	return s.failed("read the columns of", s.table, s.wrong("SELECT", s.table, s.source.CheckColumns(ctx, s.q)))
}

// column returns the column of a name: the table's column, or, under another name of the same field that means the same, the one that the
// table has.
func (s *session) column(name string) (column, bool) {
	if c, there := s.columns.find(s.dialect, name); there {
		return c, true
	}
	names := s.Columns()
	f, ok := names.Field(name)
	for _, own := range names.Fields() {
		if ok && own.Setting == f.Setting && own.SameValues(f.Field) {
			return s.columns.find(s.dialect, own.Name)
		}
	}
	return column{}, false
}

// layoutOf reads the columns of a table. A missing table is an error that names the cause.
func (s *session) layoutOf(ctx context.Context, t sqlsource.TableName) (layout, error) {
	l, err := readLayout(ctx, s.q, s.dialect, t)
	if err == nil && len(l) == 0 {
		if _, err = s.query(ctx, "SELECT", t, "SELECT 1 FROM "+s.dialect.QuoteTable(t)+" WHERE 1 = 0"); err == nil {
			err = errors.New("the table has no columns")
		}
	}
	if err != nil {
		return nil, s.failed("read the columns of", t, err)
	}
	return l, nil
}

// rowOf returns the row of a name: the one with that key, or if id is nil the one in force; nil if there is none. In a
// transaction the row is locked.
func (s *session) rowOf(ctx context.Context, name string, id *string) (*Row, error) {
	c := s.Columns()
	column, ok := s.columns.find(s.dialect, c.Name)
	if !ok {
		return nil, &ColumnError{Table: s.table.String(), Column: c.Name}
	}
	p := params{d: s.dialect}
	rows, err := s.rows(ctx, "SELECT", p.equals(column, name), &p)
	if err != nil {
		return nil, err
	}
	if id != nil {
		rows = slices.DeleteFunc(rows, func(r Row) bool { return !same(r.Values[c.ID], id) })
	}
	best := inForce(rows)
	if best == nil || s.tx == nil {
		return best, nil
	}
	locked, err := s.locked(ctx, best)
	if locked == nil || locked.Name != name {
		return nil, err
	}
	return locked, err
}

// inForce returns the row in force of several with one name; nil if there are none.
func inForce(rows []Row) (best *Row) {
	for i := range rows {
		r := &rows[i]
		if best == nil || r.Bad == nil && (best.Bad != nil || sqlsource.Newer(&r.Limit, &best.Limit)) {
			best = r
		}
	}
	return best
}

// locked reads a row again by its key, and locks it; nil if it is gone.
func (s *session) locked(ctx context.Context, r *Row) (*Row, error) {
	p := &params{d: s.dialect}
	where, err := s.key(r, p)
	if err != nil {
		return nil, err
	}
	right := "SELECT"
	if s.dialect != sqlsource.SQLite {
		where += " FOR UPDATE"
		right = "UPDATE" // PostgreSQL requires it for the lock
	}
	rows, err := s.rows(ctx, right, where, p)
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	if len(rows) > 1 {
		return nil, s.failed("change", s.table, fmt.Errorf("%d rows have the key %s", len(rows), r.ID))
	}
	return &rows[0], nil
}

// key returns the condition for exactly this row.
func (s *session) key(r *Row, p *params) (string, error) {
	column, ok := s.columns.find(p.d, s.Columns().ID)
	id := r.Values[column.name]
	if !ok || id == nil {
		return "", s.failed("change", s.table, errors.New("the row has no key"))
	}
	if p.d != sqlsource.MySQL {
		return p.equals(column, *id), nil
	}
	// The first condition can use an index, so that no other rows are locked. The second one is case-sensitive.
	first := p.d.Quote(column.name) + " = " + p.mark(*id)
	return first + " AND " + p.equals(column, *id), nil
}

// rows reads the rows that meet a condition.
func (s *session) rows(ctx context.Context, right, where string, p *params) ([]Row, error) {
	d, t := s.dialect, s.table
	modified := s.Columns().Modified
	selected := []string{d.Micros(t, modified), d.Unread(t, modified)}
	for _, c := range s.columns {
		selected = append(selected, read(d, c))
	}
	table, err := s.query(ctx, right, t, "SELECT "+strings.Join(selected, ", ")+" FROM "+d.QuoteTable(t)+" WHERE "+where, p.values...)
	if err != nil {
		return nil, err
	}
	rows := make([]Row, 0, len(table))
	for _, cells := range table {
		rows = append(rows, s.parse(cells))
	}
	return rows, nil
}

// parse converts the texts that rows selects.
func (s *session) parse(cells []*string) Row {
	modified, unread, cells := cells[0], cells[1], cells[2:]
	at := s.Columns().Modified
	row := Row{Values: Values{}}
	seen := [][2]*string{{modified, unread}}
	for i, c := range s.columns {
		value := cells[i]
		row.Values[c.name] = value
		if s.editable(c.name) && c.writable {
			row.Editable = append(row.Editable, c.name)
		}
		if c.name != at { // its text depends on the session's time zone
			seen = append(seen, [2]*string{&c.name, value})
		}
	}
	row.read(s.source, cmp.Or(modified, unread))
	text, _ := json.Marshal(seen) // strings always encode
	sum := sha256.Sum256(text)
	row.Version = Version(hex.EncodeToString(sum[:16]))
	return row
}

// query returns all rows as texts; nil stands for NULL.
func (s *session) query(ctx context.Context, right string, t sqlsource.TableName, query string, args ...any) ([][]*string, error) {
	rows, err := s.q.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, s.wrong(right, t, err)
	}
	defer func() { _ = rows.Close() }()
	columns, err := rows.Columns()
	if err != nil {
		return nil, s.wrong(right, t, err)
	}
	var table [][]*string
	for rows.Next() {
		texts, cells := make([]sql.NullString, len(columns)), make([]any, len(columns))
		for i := range texts {
			cells[i] = &texts[i]
		}
		if err := rows.Scan(cells...); err != nil {
			return nil, s.wrong(right, t, err)
		}
		row := make([]*string, len(columns))
		for i := range texts {
			if texts[i].Valid {
				row[i] = &texts[i].String
			}
		}
		table = append(table, row)
	}
	if err := rows.Err(); err != nil {
		return nil, s.wrong(right, t, err)
	}
	return table, nil
}

// exec executes a statement that needs a right.
func (s *session) exec(ctx context.Context, right string, t sqlsource.TableName, statement string, args ...any) (sql.Result, error) {
	result, err := s.tx.ExecContext(ctx, statement, args...)
	return result, s.wrong(right, t, err)
}

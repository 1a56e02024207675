package sqlsource

import (
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
)

// session is one transaction of an Editor, or a reading without.
type session struct {
	*Editor
	q       querier
	tx      *sql.Tx // nil: nothing is locked
	columns layout
}

// turnWait is how long an editor waits for its turn, if its context does not end before.
const turnWait = 10 * time.Second

// transact calls do in a transaction. Editors of one table take turns, so that two do not add the same row.
func (e *Editor) transact(ctx context.Context, do func(*session) error) error {
	d := e.options.dialect
	if err := e.audited(ctx); err != nil {
		return err
	}
	conn, err := e.db.Conn(ctx)
	if err != nil {
		return e.failed("begin a change of", e.options.table, err)
	}
	defer func() { _ = conn.Close() }()
	if d == MySQL {
		if err := e.transactional(ctx, conn); err != nil {
			return err
		}
		free, err := e.turn(ctx, conn)
		if err != nil {
			return err
		}
		defer free()
	}
	var isolation sql.TxOptions
	if d == PostgreSQL {
		isolation.Isolation = sql.LevelReadCommitted
	}
	tx, err := conn.BeginTx(ctx, &isolation)
	if err != nil {
		return e.failed("begin a change of", e.options.table, err)
	}
	defer func() { _ = tx.Rollback() }() // nothing, after Commit
	s := &session{Editor: e, q: tx, tx: tx}
	switch d {
	case PostgreSQL:
		_, err = s.exec(ctx, "lock", e.options.table, fmt.Sprintf("SELECT pg_advisory_xact_lock(%d, hashtext($1::text))", turnLock), e.options.table.String())
	case SQLite: // a transaction that reads before it writes may fail to
		_, err = s.exec(ctx, "INSERT", e.options.audit, "DELETE FROM "+d.quoteTable(e.options.audit)+" WHERE 0")
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
		return e.failed("commit a change of", e.options.table, err)
	}
	return nil
}

// transactional tells if a table of MySQL is of an engine without transactions, such as MyISAM.
func (e *Editor) transactional(ctx context.Context, q querier) error {
	for _, t := range []tableName{e.options.table, e.options.audit} {
		schema := "DATABASE()"
		if t.schema != "" {
			schema = "'" + t.schema + "'"
		}
		s := &session{Editor: e, q: q}
		engines, err := s.query(ctx, "SELECT", t, "SELECT t.ENGINE FROM information_schema.TABLES AS t JOIN information_schema.ENGINES AS e ON e.ENGINE = t.ENGINE"+
			" WHERE t.TABLE_SCHEMA = "+schema+" AND t.TABLE_NAME = '"+t.name+"' AND e.TRANSACTIONS = 'NO'")
		if err == nil && len(engines) > 0 {
			err = fmt.Errorf("its engine, %s, has no transactions", plainValue(engines[0][0]))
		}
		if err != nil {
			return e.failed("change", t, err)
		}
	}
	return nil
}

// turnLock is the first half of an advisory lock's key.
const turnLock = 0x746f6b65 // "toke"

// turn waits for the lock of MySQL that belongs to a connection, and not to a transaction. It is before the transaction's first read,
// which then sees what whoever had it before has committed.
func (e *Editor) turn(ctx context.Context, conn *sql.Conn) (free func(), err error) {
	const name = "CONCAT('tokenbucket ', SHA1(CONCAT(COALESCE(DATABASE(), ''), '.', ?)))" // of 64 letters at most
	var got sql.NullInt64
	table := e.options.table.String()
	err = conn.QueryRowContext(ctx, "SELECT GET_LOCK("+name+", ?)", table, int(turnWait/time.Second)).Scan(&got)
	if err != nil {
		return nil, e.failed("lock", e.options.table, err)
	}
	if got.Int64 != 1 {
		return nil, e.failed("lock", e.options.table, errors.New("another editor is at work"))
	}
	return func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if _, err := conn.ExecContext(ctx, "DO RELEASE_LOCK("+name+")", table); err != nil {
			_ = conn.Raw(func(any) error { return driver.ErrBadConn }) // with the connection the lock goes, too
		}
	}, nil
}

// prepare reads which columns there are. Known ones have the names that they were given.
func (s *session) prepare(ctx context.Context) error {
	l, err := s.layoutOf(ctx, s.options.table)
	if err != nil {
		return err
	}
	d := s.options.dialect
	for _, f := range s.options.columns.fields() {
		for i := range l {
			if d != PostgreSQL && strings.EqualFold(l[i].name, *f.name) {
				l[i].name = *f.name
			}
		}
	}
	s.columns = l
	return nil
}

// layoutOf reads which columns a table has. That there is none is an error, which tells why.
func (s *session) layoutOf(ctx context.Context, t tableName) (layout, error) {
	l, err := readLayout(ctx, s.q, s.options.dialect, t)
	if err == nil && len(l) == 0 {
		if _, err = s.query(ctx, "SELECT", t, "SELECT 1 FROM "+s.options.dialect.quoteTable(t)+" WHERE 1 = 0"); err == nil {
			err = errors.New("no columns")
		}
	}
	if err != nil {
		return nil, s.failed("read the columns of", t, err)
	}
	return l, nil
}

// row returns the row of a name, of several the one that is in force; nil if there is none. In a transaction nobody else changes it
// until its end.
func (s *session) row(ctx context.Context, name string) (*Row, error) {
	c := &s.options.columns
	column, ok := s.columns.find(s.options.dialect, c.Name)
	if !ok {
		return nil, &ColumnError{Table: s.options.table.String(), Column: c.Name}
	}
	p := params{d: s.options.dialect}
	rows, err := s.rows(ctx, "SELECT", p.equals(column, name), &p)
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	best := &rows[0]
	for i := range rows[1:] {
		r := &rows[i+1]
		if r.Bad == nil && (best.Bad != nil || newer(&r.Limit, &best.Limit)) {
			best = r
		}
	}
	if s.tx == nil {
		return best, nil
	}
	locked, err := s.locked(ctx, best)
	if locked == nil || locked.Name != name {
		return nil, err
	}
	return locked, err
}

// locked reads a row again, by its key, so that nobody else changes it; nil if it is gone.
func (s *session) locked(ctx context.Context, r *Row) (*Row, error) {
	p := &params{d: s.options.dialect}
	where, err := s.key(r, p)
	if err != nil {
		return nil, err
	}
	right := "SELECT"
	if s.options.dialect != SQLite {
		where += " FOR UPDATE"
		right = "UPDATE" // PostgreSQL asks for it already here
	}
	rows, err := s.rows(ctx, right, where, p)
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	if len(rows) > 1 {
		return nil, s.failed("change", s.options.table, fmt.Errorf("%d rows have the key %s", len(rows), r.ID))
	}
	return &rows[0], nil
}

// key is the condition for exactly this row.
func (s *session) key(r *Row, p *params) (string, error) {
	column, ok := s.columns.find(p.d, s.options.columns.ID)
	id := r.Values[column.name]
	if !ok || id == nil {
		return "", s.failed("change", s.options.table, errors.New("the row has no key"))
	}
	if p.d != MySQL {
		return p.equals(column, *id), nil
	}
	// By the first an index can be used, and no other rows are locked; the second tells A from a.
	first := p.d.quote(column.name) + " = " + p.mark(*id)
	return first + " AND " + p.equals(column, *id), nil
}

// missing are the columns that are read where a table has them, and this one has not.
func (s *session) missing() []string {
	return slices.DeleteFunc(s.options.byDefault(), func(name string) bool {
		_, there := s.columns.find(s.options.dialect, name)
		return there
	})
}

// rows reads the rows for which a condition holds.
func (s *session) rows(ctx context.Context, right, where string, p *params) ([]Row, error) {
	d, o := s.options.dialect, s.options
	selected := o.selected(s.missing()...)
	known := len(selected)
	for _, c := range s.columns {
		selected = append(selected, d.read(c))
	}
	table, err := s.query(ctx, right, o.table, "SELECT "+strings.Join(selected, ", ")+" FROM "+d.quoteTable(o.table)+" WHERE "+where, p.values...)
	if err != nil {
		return nil, err
	}
	rows := make([]Row, 0, len(table))
	for _, cells := range table {
		rows = append(rows, s.parse(cells, known))
	}
	return rows, nil
}

// modifiedCells are those of raw that are the time of the last modification.
const modifiedCells = 5

func (s *session) parse(cells []*string, known int) Row {
	var r raw
	for i, c := range r.cells() {
		if cells[i] != nil {
			*c.(*sql.RawBytes) = []byte(*cells[i])
		}
	}
	row := Row{Name: string(r.name), ID: rowName(r.id), Values: Values{}}
	row.Limit, row.Bad = s.parser.limit(&r)
	seen := [][2]*string{{cells[modifiedCells], cells[modifiedCells+1]}}
	for i, c := range s.columns {
		value := cells[known+i]
		row.Values[c.name] = value
		if s.editable(c.name) && c.writable {
			row.Editable = append(row.Editable, c.name)
		}
		if c.name != s.options.columns.Modified { // whose text depends on the session's time zone
			seen = append(seen, [2]*string{&c.name, value})
		}
	}
	text, _ := json.Marshal(seen) // it has texts only
	sum := sha256.Sum256(text)
	row.Version = Version(hex.EncodeToString(sum[:16]))
	return row
}

// query returns all rows as texts; NULL is nil.
func (s *session) query(ctx context.Context, right string, t tableName, query string, args ...any) ([][]*string, error) {
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
func (s *session) exec(ctx context.Context, right string, t tableName, statement string, args ...any) (sql.Result, error) {
	result, err := s.tx.ExecContext(ctx, statement, args...)
	return result, s.wrong(right, t, err)
}

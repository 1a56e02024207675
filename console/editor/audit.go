package editor

import (
	"bytes"
	"context"
	"database/sql"
	"embed"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

const defaultAuditTable = "t_ratelimite_audit"

//go:embed schema/*.sql
var schemas embed.FS

// AuditSchema returns the statement that creates the audit table.
func AuditSchema(dialect sqlsource.Dialect, opts ...Option) (string, error) {
	o, err := newOptions(dialect, opts)
	if err != nil {
		return "", err
	}
	return o.schema()
}

func (o *options) schema() (string, error) {
	text, err := schemas.ReadFile("schema/" + strings.ToLower(o.dialect.String()) + ".sql")
	if err != nil {
		return "", fmt.Errorf("editor: schema of %v: %w", o.dialect, err)
	}
	return strings.ReplaceAll(string(text), o.dialect.Quote(defaultAuditTable), o.dialect.QuoteTable(o.audit)), nil
}

// createLock is an advisory lock: without it, concurrent CREATE ... IF NOT EXISTS can fail in PostgreSQL.
const createLock = 0x746f6b656e62 // "tokenb"

// CreateAuditTable creates the audit table if it does not exist. Many processes may call it at once.
func CreateAuditTable(ctx context.Context, db *sql.DB, dialect sqlsource.Dialect, opts ...Option) error {
	o, err := newOptions(dialect, opts)
	if err != nil {
		return err
	}
	text, err := o.schema()
	if err != nil {
		return err
	}
	if db == nil {
		return errNilDB
	}
	failed := func(err error) error { return fmt.Errorf("editor: create table %s: %w", o.audit, err) }
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return failed(err)
	}
	defer func() { _ = tx.Rollback() }() // has no effect after Commit
	if dialect == sqlsource.PostgreSQL {
		if _, err := tx.ExecContext(ctx, fmt.Sprintf("SELECT pg_advisory_xact_lock(%d)", int64(createLock))); err != nil {
			return failed(err)
		}
	}
	if _, err := tx.ExecContext(ctx, text); err != nil {
		return failed(err)
	}
	if err := tx.Commit(); err != nil {
		return failed(err)
	}
	return nil
}

// auditColumns are the columns of the audit table, in the order in which entries read them.
var auditColumns = [...]string{"auditId", "changedAt", "changedBy", "why", "ofTable", "name", "fromRow", "toRow", "undoneBy"}

// auditColumn returns the name of a column in the dialect's case.
func auditColumn(d sqlsource.Dialect, name string) string {
	if d == sqlsource.PostgreSQL {
		return strings.ToLower(name)
	}
	return name
}

// audited returns ErrNoAudit if the audit table does not exist.
func (e *Editor) audited(ctx context.Context) error {
	s := &session{Editor: e, q: e.db}
	_, err := s.query(ctx, "SELECT", e.audit, "SELECT 1 FROM "+e.dialect.QuoteTable(e.audit)+" WHERE 1 = 0")
	if sqlsource.FaultOf(err) == sqlsource.NoTable || err != nil && strings.Contains(err.Error(), "no such table") { // SQLite has no code of its own for it
		return fmt.Errorf("%w: %w", ErrNoAudit, err)
	}
	return e.failed("read", e.audit, err)
}

// record writes an entry, and returns it as the table has it.
func (s *session) record(ctx context.Context, a *AuditEntry, undoes int64) (AuditEntry, error) {
	d, t := s.dialect, s.audit
	p := params{d: d}
	var columns, values []string
	put := func(column string, value *string) {
		columns = append(columns, d.Quote(auditColumn(d, column)))
		if value == nil {
			values = append(values, "NULL")
			return
		}
		values = append(values, p.text(*value))
	}
	put("changedBy", &a.Who)
	put("why", &a.Why)
	put("ofTable", &a.Table)
	put("name", &a.Name)
	to := a.To.json()
	if a.Action != "" {
		to = actionText(a.Action)
	}
	put("fromRow", a.From.json())
	put("toRow", to)
	insert := "INSERT INTO " + d.QuoteTable(t) + " (" + strings.Join(columns, ", ") + ") VALUES (" + strings.Join(values, ", ") + ")"
	id, err := s.insert(ctx, insert, p.values)
	if err == nil && undoes != 0 {
		_, err = s.exec(ctx, "UPDATE", t, fmt.Sprintf("UPDATE %s SET %s = %d WHERE %s = %d", d.QuoteTable(t),
			d.Quote(auditColumn(d, "undoneBy")), id, d.Quote(auditColumn(d, "auditId")), undoes))
	}
	if err != nil {
		return AuditEntry{}, s.failed("write", t, err)
	}
	return s.entry(ctx, id, false)
}

// insert inserts an entry, and returns its key.
func (s *session) insert(ctx context.Context, statement string, args []any) (int64, error) {
	if s.dialect != sqlsource.PostgreSQL {
		result, err := s.exec(ctx, "INSERT", s.audit, statement, args...)
		if err != nil {
			return 0, err
		}
		return result.LastInsertId()
	}
	keys, err := s.query(ctx, "INSERT", s.audit, statement+" RETURNING auditid::text", args...)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(*keys[0][0], 10, 64)
}

// entry reads one entry. In a transaction, lock keeps others from changing it.
func (s *session) entry(ctx context.Context, id int64, lock bool) (AuditEntry, error) {
	where := fmt.Sprintf(" WHERE %s = %d", s.dialect.Quote(auditColumn(s.dialect, "auditId")), id)
	right := "SELECT"
	if lock && s.dialect != sqlsource.SQLite {
		where += " FOR UPDATE"
		right = "UPDATE"
	}
	entries, err := s.entries(ctx, right, where)
	if err != nil {
		return AuditEntry{}, err
	}
	if len(entries) == 0 {
		return AuditEntry{}, fmt.Errorf("%w: %d", ErrNoEntry, id)
	}
	return entries[0], nil
}

func (s *session) entries(ctx context.Context, right, where string, args ...any) ([]AuditEntry, error) {
	d, t := s.dialect, s.audit
	var selected []string
	for _, c := range auditColumns {
		switch c = auditColumn(d, c); {
		case strings.EqualFold(c, "changedAt"):
			selected = append(selected, d.Micros(t, c))
		default:
			selected = append(selected, d.Text(c))
		}
	}
	rows, err := s.query(ctx, right, t, "SELECT "+strings.Join(selected, ", ")+" FROM "+d.QuoteTable(t)+where, args...)
	if err != nil {
		return nil, s.failed("read", t, err)
	}
	entries := make([]AuditEntry, 0, len(rows))
	for _, row := range rows {
		a, err := parseEntry(row)
		if err != nil {
			return nil, s.failed("read", t, err)
		}
		entries = append(entries, a)
	}
	return entries, nil
}

// parseEntry decodes a row of the audit table. Its content is not trusted.
func parseEntry(row []*string) (a AuditEntry, err error) {
	text := func(i int) string {
		if row[i] == nil {
			return ""
		}
		return *row[i]
	}
	whole := func(i int) int64 {
		if row[i] == nil || err != nil {
			return 0
		}
		n, wrong := strconv.ParseInt(*row[i], 10, 64)
		if wrong != nil {
			err = fmt.Errorf("entry %.20s: %s %s: want a whole number", text(0), auditColumns[i], registry.ShortValue([]byte(*row[i])))
		}
		return n
	}
	a = AuditEntry{ID: whole(0), At: time.UnixMicro(whole(1)).UTC(), Who: text(2), Why: text(3), Table: text(4), Name: text(5), UndoneBy: whole(8)}
	if err == nil {
		a.From, err = parseValues(row[6])
	}
	if what, ok := parseAction(row[7]); ok {
		a.Action = what
	} else if err == nil {
		a.To, err = parseValues(row[7])
	}
	if err != nil {
		err = fmt.Errorf("entry %.20s: %w", text(0), err)
	}
	return a, err
}

// History returns at most limit entries about a row and its bucket (Act), the newest first. With an empty name it returns
// those of all rows, of the switch and of the whole fleet.
func (e *Editor) History(ctx context.Context, name string, limit int) ([]AuditEntry, error) {
	if err := e.audited(ctx); err != nil {
		return nil, err
	}
	d := e.dialect
	s, p := &session{Editor: e, q: e.db}, params{d: d}
	where := ""
	if name != "" {
		where = " WHERE " + p.equals(column{name: auditColumn(d, "name")}, name) + " AND " +
			p.equals(column{name: auditColumn(d, "ofTable")}, e.table.String())
	}
	// Without its table, the name would mean the selected column, which is a text.
	where += fmt.Sprintf(" ORDER BY %s.%s DESC LIMIT %d", d.QuoteTable(e.audit), d.Quote(auditColumn(d, "auditId")), max(limit, 1))
	return s.entries(ctx, "SELECT", where, p.values...)
}

// maxName bounds the name of a bucket in bytes, as in a registry.
const maxName = 512

// reasons validates the name, the author and the reason of a change.
func reasons(name, who, why string) error {
	for _, f := range []struct {
		field, text string
		most        int
	}{{"name", name, maxName}, {"who", who, 256}, {"why", why, 2000}} {
		blank := f.field != "name" && strings.TrimSpace(f.text) == ""
		if len(f.text) < 1 || len(f.text) > f.most || !utf8.ValidString(f.text) || strings.ContainsRune(f.text, 0) || blank {
			return &registry.RowError{Row: newRow, Name: name, Field: f.field, Value: registry.ShortValue([]byte(f.text)),
				Want: fmt.Sprintf("1 to %d bytes of UTF-8, not only blanks", f.most)}
		}
	}
	return nil
}

// json encodes values for the audit table: strings and null. Values that are not UTF-8 become {"hex": "ff"}.
func (v Values) json() *string {
	if v == nil {
		return nil
	}
	plain := make(map[string]any, len(v))
	for column, value := range v {
		switch {
		case value == nil:
			plain[column] = nil
		case utf8.ValidString(*value):
			plain[column] = *value
		default:
			plain[column] = map[string]string{"hex": hex.EncodeToString([]byte(*value))}
		}
	}
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false) // people read it
	_ = encoder.Encode(plain)    // maps of strings always encode
	text := strings.TrimSpace(b.String())
	return &text
}

func parseValues(text *string) (Values, error) {
	if text == nil {
		return nil, nil
	}
	var plain map[string]any
	if err := json.Unmarshal([]byte(*text), &plain); err != nil {
		return nil, err
	}
	v := Values{}
	for column, value := range plain {
		switch value := value.(type) {
		case nil:
			v[column] = nil
		case string:
			v[column] = &value
		case map[string]any:
			h, _ := value["hex"].(string)
			b, err := hex.DecodeString(h)
			if err != nil {
				return nil, err
			}
			s := string(b)
			v[column] = &s
		default: // written by a person
			v[column] = Text(value)
		}
	}
	return v, nil
}

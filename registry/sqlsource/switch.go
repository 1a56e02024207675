package sqlsource

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

const (
	defaultSwitchTable = "t_ratelimite_switch"
	defaultSwitchName  = "global"
)

// SwitchOption configures [NewSwitch]. An option with a bad value makes it fail.
type SwitchOption func(*switchOptions)

type switchOptions struct {
	dialect Dialect
	table   TableName
	name    string
	polling []killswitch.Option
	err     error
}

// WithSwitchTable sets the table's name. Default "t_ratelimite_switch". What names may be: see [WithTable].
func WithSwitchTable(name string) SwitchOption {
	return func(o *switchOptions) {
		t, err := o.dialect.ParseTable(name)
		if err != nil && o.err == nil {
			o.err = err
		}
		o.table = t
	}
}

// WithSwitchName sets the name of the switch's row: 1 to 64 bytes of ASCII. Default "global".
func WithSwitchName(name string) SwitchOption {
	return func(o *switchOptions) {
		ok := len(name) >= 1 && len(name) <= 64
		for _, c := range []byte(name) {
			ok = ok && c > ' ' && c < 0x7f
		}
		if !ok && o.err == nil {
			o.err = invalid("switch name", fmt.Sprintf("%.80q", name), "1 to 64 bytes of ASCII without blanks")
		}
		o.name = name
	}
}

// WithPolling adds options for reading the switch, such as killswitch.WithInterval.
func WithPolling(opts ...killswitch.Option) SwitchOption {
	return func(o *switchOptions) { o.polling = append(o.polling, opts...) }
}

func newSwitchOptions(d Dialect, opts []SwitchOption) (*switchOptions, error) {
	if err := d.known(); err != nil {
		return nil, err
	}
	o := &switchOptions{dialect: d, table: TableName{Name: defaultSwitchTable}, name: defaultSwitchName}
	for _, opt := range opts {
		if opt == nil {
			return nil, invalid("switch option", "nil", "no nil options")
		}
		opt(o)
	}
	return o, o.err
}

// SwitchRow returns the table and the name of the row of a switch with these options.
func SwitchRow(dialect Dialect, opts ...SwitchOption) (table TableName, name string, err error) {
	o, err := newSwitchOptions(dialect, opts)
	if err != nil {
		return TableName{}, "", err
	}
	return o.table, o.name, nil
}

// SwitchSchema returns the statements that make the table of [NewSwitch].
func SwitchSchema(dialect Dialect, opts ...SwitchOption) (string, error) {
	o, err := newSwitchOptions(dialect, opts)
	if err != nil {
		return "", err
	}
	return o.schema()
}

func (o *switchOptions) schema() (string, error) {
	text, err := schemas.ReadFile("schema/" + strings.ToLower(o.dialect.String()) + "_switch.sql")
	if err != nil {
		return "", fmt.Errorf("sqlsource: schema of %v: %w", o.dialect, err)
	}
	return strings.NewReplacer(renameTable(o.dialect, defaultSwitchTable, o.table)...).Replace(string(text)), nil
}

// CreateSwitchTable makes the table of [NewSwitch] if it does not exist. Many processes may call it at once.
func CreateSwitchTable(ctx context.Context, db *sql.DB, dialect Dialect, opts ...SwitchOption) error {
	o, err := newSwitchOptions(dialect, opts)
	if err != nil {
		return err
	}
	text, err := o.schema()
	if err != nil {
		return err
	}
	return create(ctx, db, dialect, o.table, text)
}

// NewSwitch returns a switch of the whole fleet in one row of a table, with the columns name and enabled (1 or 0). The database compares the
// name, so its collation decides whether 'Global' is the row of "global"; in the created table it is not. A missing row means on. A
// missing table or another value is an error, and the last known state stays in force. Set writes the row. If the table has columns
// changedAt and changedBy, in upper or lower case, they are the switch's origin; the created table keeps changedAt by itself. For the times of
// reads and for outages of the database see killswitch.Switch.
func NewSwitch(db *sql.DB, dialect Dialect, opts ...SwitchOption) (*killswitch.Switch, error) {
	if db == nil {
		return nil, errNilDB
	}
	o, err := newSwitchOptions(dialect, opts)
	if err != nil {
		return nil, err
	}
	where := o.dialect.QuoteTable(o.table)
	name, enabled := o.dialect.Quote("name"), o.dialect.Quote("enabled")
	// The query selects the whole table of a few rows and has no parameter, which would cost some drivers two more round trips. The database
	// compares the names, so that the row of a collation that ignores case is read if it is the row that Set writes.
	query := "SELECT " + o.dialect.Text("name") + ", CASE WHEN " + name + " = " + o.dialect.literal(o.name) + " THEN 1 ELSE 0 END, " +
		o.dialect.cast("enabled") + ", t.* FROM " + where + " AS t"
	var origin atomic.Value // string
	origin.Store("")
	read := func(ctx context.Context) (bool, error) {
		row, err := readSwitch(ctx, db, query, o.name)
		if err != nil {
			return false, fmt.Errorf("table %s, name %s: %w", where, o.name, err)
		}
		origin.Store(row.origin())
		return row.on, nil
	}
	upsert := "INSERT INTO " + where + " (" + name + ", " + enabled + ") VALUES "
	switch o.dialect {
	case MySQL:
		upsert += "(?, ?) ON DUPLICATE KEY UPDATE " + enabled + " = ?"
	case PostgreSQL:
		upsert += "($1, $2) ON CONFLICT (" + name + ") DO UPDATE SET " + enabled + " = $3"
	default:
		upsert += "(?, ?) ON CONFLICT (" + name + ") DO UPDATE SET " + enabled + " = ?"
	}
	write := func(ctx context.Context, on bool) error {
		value := 0
		if on {
			value = 1
		}
		if _, err := db.ExecContext(ctx, upsert, o.name, value, value); err != nil {
			return fmt.Errorf("table %s, name %s: %w", where, o.name, err)
		}
		return nil
	}
	return killswitch.New(read, append([]killswitch.Option{
		killswitch.WithWrite(write), killswitch.WithOrigin(func() string { return origin.Load().(string) }),
	}, o.polling...)...)
}

// switchRow is the state of a switch in the table, with its origin.
type switchRow struct {
	on     bool
	by, at string
}

func (r *switchRow) origin() string {
	text := ""
	if r.at != "" {
		text = "at " + r.at
	}
	if r.by != "" {
		text = strings.TrimSpace(text + " by " + r.by)
	}
	return text
}

func readSwitch(ctx context.Context, db *sql.DB, query, name string) (row switchRow, err error) {
	rows, err := db.QueryContext(ctx, query)
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	columns, err := rows.Columns()
	if err != nil {
		return row, err
	}
	row.on = true
	exact := false // a row has the name itself; without a unique key there may be others beside it
	for rows.Next() {
		var of, value sql.RawBytes
		var equal int
		cells, others := []any{&of, &equal, &value}, make([]any, len(columns)-3)
		for i := range others {
			cells = append(cells, &others[i])
		}
		if err := rows.Scan(cells...); err != nil {
			return row, err
		}
		if same := string(of) == name; !same && (equal == 0 || exact) {
			continue
		} else if same {
			exact = true
		}
		on, ok := registry.ParseFlag(string(value))
		if !ok {
			return row, fmt.Errorf("enabled %s: want 0 or 1", registry.ShortValue(value))
		}
		row.on, row.by, row.at = on, "", ""
		for i, column := range columns[3:] {
			switch strings.ToLower(column) {
			case "changedby":
				row.by = plain(others[i])
			case "changedat":
				row.at = plain(others[i])
			}
		}
	}
	return row, rows.Err()
}

// plain returns a value as text, for a message.
func plain(v any) string {
	switch v := v.(type) {
	case nil:
		return ""
	case time.Time:
		return v.Format(time.RFC3339)
	case []byte:
		return strings.Trim(registry.ShortValue(v), `"`)
	}
	return strings.Trim(registry.ShortValue(fmt.Append(nil, v)), `"`)
}

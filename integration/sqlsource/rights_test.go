package sqlsource

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// reader returns a database whose user may read some columns of the table alone.
func (b backend) reader(t *testing.T, admin *sql.DB, place, dsn string, columns []string) *sql.DB {
	t.Helper()
	user := "reader_" + place
	exec(t, admin, "CREATE USER "+user)
	if b.dialect == sqlsource.MySQL {
		dsn = strings.Replace(dsn, "root:@", user+":@", 1)
	} else {
		exec(t, admin, "GRANT USAGE ON SCHEMA "+place+" TO "+user)
		dsn = strings.Replace(dsn, "//postgres@", "//"+user+"@", 1)
	}
	for _, c := range columns {
		exec(t, admin, "GRANT SELECT ("+b.quoted(c)+") ON "+place+"."+conf+" TO "+user)
	}
	return open(t, b.driver, dsn)
}

// A column that the table has and the user may not read makes the load fail, and the error names it: without it a row would lose its window
// or its concurrency. The rows in force stay.
func TestColumnThatMayNotBeRead(t *testing.T) {
	for _, b := range backends {
		if b.dialect == sqlsource.SQLite { // which has no users
			continue
		}
		for _, hidden := range []string{"window_limit", "concurrent", "rate"} {
			t.Run(b.name+" "+hidden, func(t *testing.T) {
				t.Parallel()
				place, dsn := b.place(t)
				admin := open(t, b.driver, dsn)
				require.NoError(t, sqlsource.CreateTable(ctx, admin, b.dialect))
				b.insert(t, admin, conf, "name, rate, "+b.quoted("window")+", window_limit, concurrent", "/a", 5, 3600, 100, 3)
				var columns []string
				for _, c := range []string{"configId", "name", "rate", "max_wait", "disabled", "window", "window_limit", "concurrent", "concurrent_wait", "shadow", "per_key", "penalty", "priority", "lastModifyTime"} {
					columns = append(columns, b.column(c))
				}
				db := b.reader(t, admin, place, dsn, columns)
				limits, err := registry.New(source(t, b, db), tokenbucket.NewMemoryStore(), registry.WithLocalWindows(), registry.WithLocalSemaphores(), registry.WithInterval(1e12))
				require.NoError(t, err)
				defer limits.Close()
				require.Equal(t, 3, limits.Limits()[0].Concurrent)

				exec(t, admin, "REVOKE SELECT ("+b.quoted(b.column(hidden))+") ON "+place+"."+conf+" FROM reader_"+place)
				err = limits.Reload(ctx)
				var right *sqlsource.RightError
				require.ErrorAs(t, err, &right)
				require.Equal(t, "SELECT", right.Right)
				require.Equal(t, b.column(hidden), right.Column)
				require.Equal(t, 100, limits.Limits()[0].WindowLimit, "what was in force stays")
				require.Equal(t, 3, limits.Limits()[0].Concurrent)

				edit := editorOf(t, b, db)
				_, err = edit.Get(ctx, "/a")
				require.ErrorAs(t, err, &right, "nor is a row shown without what it says")
			})
		}
	}
}

// quoted is a column as a statement may have it.
func (b backend) quoted(column string) string {
	if b.dialect == sqlsource.PostgreSQL {
		return `"` + column + `"`
	}
	return "`" + column + "`"
}

// aGrant is one right of a user of docs/security.md.
type aGrant struct{ right, on, user string }

// documentedGrants returns the grants of docs/security.md, one for each right. Those behind "-- PostgreSQL" are for that database alone.
func (b backend) documentedGrants(t *testing.T) (all []aGrant) {
	t.Helper()
	text, err := os.ReadFile("../../docs/security.md")
	require.NoError(t, err)
	for line := range strings.Lines(string(text)) {
		m := regexp.MustCompile(`^GRANT ([A-Z, ]+) ON (.+) TO (\w+);(.*)$`).FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			require.NotContains(t, line, "GRANT ", "a grant of another form")
			continue
		}
		if !strings.Contains(m[4], "PostgreSQL") || b.dialect == sqlsource.PostgreSQL {
			for right := range strings.SplitSeq(m[1], ", ") {
				all = append(all, aGrant{right, m[2], m[3]})
			}
		}
	}
	return all
}

// A gateway, and an editor, can do everything with the grants of docs/security.md, and without any one of them something fails. The error names
// the right. Tables are created with the right to create, also if they exist.
func TestGrants(t *testing.T) {
	for _, b := range backends[:2] { // SQLite has no users
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			place, dsn := b.place(t)
			admin := open(t, b.driver, dsn)
			newEditor(t, b, admin)
			require.NoError(t, sqlsource.CreateSwitchTable(ctx, admin, b.dialect))
			users := map[string]*sql.DB{}
			for _, user := range []string{"gateway", "editor"} {
				name := user + "_" + place
				exec(t, admin, "CREATE USER "+name)
				users[user] = open(t, b.driver, strings.NewReplacer("root:@", name+":@", "//postgres@", "//"+name+"@").Replace(dsn))
			}
			change := func(verb, to string, g aGrant) {
				_, table, _ := strings.Cut(" "+g.on, "limits")
				exec(t, admin, verb+" "+g.right+" ON "+strings.TrimSuffix(g.on, "limits"+table)+place+table+" "+to+" "+g.user+"_"+place)
			}
			grants := b.documentedGrants(t)
			tried := map[string]bool{}
			for _, g := range grants {
				change("GRANT", "TO", g)
				tried[g.user] = true
			}
			require.Len(t, tried, len(users), "the users of the page")
			operate := func(user string) error {
				exec(t, admin, "DELETE FROM "+conf)
				exec(t, admin, "DELETE FROM t_ratelimite_switch")
				b.insert(t, admin, conf, "name, rate", "/a", 5)
				if user == "gateway" {
					return b.operateGateway(t, users[user])
				}
				return operateEditor(editorOf(t, b, users[user]))
			}
			for user, db := range users {
				require.NoError(t, operate(user), user)
				require.Error(t, sqlsource.CreateTable(ctx, db, b.dialect), "it exists, but the database checks the right first")
				require.Error(t, sqlsource.CreateSwitchTable(ctx, db, b.dialect))
			}
			for _, g := range grants {
				change("REVOKE", "FROM", g)
				err := operate(g.user)
				require.Error(t, err, "without %s on %s everything works for %s", g.right, g.on, g.user)
				var right *sqlsource.RightError
				if errors.As(err, &right) {
					require.Equal(t, [2]string{g.right, strings.TrimPrefix(g.on, "limits.")}, of(right))
				}
				t.Logf("%s without %s on %s: %v", g.user, g.right, g.on, err)
				change("GRANT", "TO", g)
				require.NoError(t, operate(g.user))
			}
		})
	}
}

// operateGateway does what a gateway does with its database.
func (b backend) operateGateway(t *testing.T, db *sql.DB) error {
	_, err := source(t, b, db).Load(ctx)
	sw, e := sqlsource.NewSwitch(db, b.dialect)
	require.NoError(t, e)
	defer sw.Close()
	return errors.Join(err, sw.Err())
}

// operateEditor does what a console does with its database: it adds, changes and removes a row, takes that back, and turns the switch twice.
func operateEditor(e *editor.Editor) error {
	var version editor.Version
	for _, values := range []editor.Values{to(e, 5, nil), to(e, 6, nil), nil} {
		done, err := e.Change(ctx, editor.Change{Name: "/b", From: version, To: values, Who: "ann", Why: "to see"})
		if err == nil && values == nil {
			_, err = e.Undo(ctx, done.ID, "ann", "back")
		}
		if err != nil {
			return err
		}
		row, err := e.Get(ctx, "/b")
		if err != nil {
			return err
		}
		version = row.Version
	}
	if _, err := e.Act(ctx, editor.Action{Name: "/a", What: "reset", Who: "ann", Why: "to see"}, func(context.Context) error { return nil }); err != nil {
		return err
	}
	for _, on := range []bool{false, true} {
		if _, err := e.SetSwitch(ctx, on, "ann", "to see"); err != nil {
			return err
		}
	}
	_, err := e.History(ctx, "", 10)
	return err
}

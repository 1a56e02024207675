package console_test

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/console/fleet/fleettest"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// table is a table of limits in SQLite.
type table struct{ db *sql.DB }

func (r *table) rate(t *testing.T, name string) (rate string) {
	require.NoError(t, r.db.QueryRow("SELECT CAST(rate AS TEXT) FROM t_ratelimite_conf WHERE name = ?", name).Scan(&rate))
	return rate
}

// serveTable serves a console that may change everything, of the example's fleet.
func serveTable(t *testing.T) (at string, rows *table) {
	config, rows := withTable(t)
	return serve(t, config), rows
}

// editorOf returns an editor of the table in a database of SQLite.
func editorOf(t *testing.T, db *sql.DB) *editor.Editor {
	source, err := sqlsource.New(db, sqlsource.SQLite)
	require.NoError(t, err)
	e, err := editor.New(db, source)
	require.NoError(t, err)
	return e
}

// withTable is the configuration of a console that may change everything, of the example's fleet.
func withTable(t *testing.T) (config console.Config, rows *table) {
	db, err := sql.Open("sqlite", "file:"+filepath.Join(t.TempDir(), "limits.db")+"?_pragma=busy_timeout(5000)")
	require.NoError(t, err)
	t.Cleanup(func() { _ = db.Close() })
	require.NoError(t, sqlsource.CreateTable(t.Context(), db, sqlsource.SQLite))
	require.NoError(t, editor.CreateAuditTable(t.Context(), db, sqlsource.SQLite))
	_, err = db.Exec("INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/ibe/AvailFare', 5, 0.5)")
	require.NoError(t, err)
	return console.Config{
		Source: fleettest.Example(), Editor: editorOf(t, db), Access: writers(),
		Penalize: func(context.Context, string, time.Duration) error { return nil },
		Reset:    func(context.Context, string) error { return nil },
		Turn:     func(context.Context, bool, string, string) error { return nil },
		Confirm:  func(context.Context, string, string) error { return nil },
	}, &table{db}
}

// A row is changed with a preview and a reason, another user's change is not overwritten, and a change is undone.
func TestEditConflictUndo(t *testing.T) {
	at, rows := serveTable(t)
	page := at + "change?name=%2Fibe%2FAvailFare"
	p := open(t, page, signedIn())
	p.waitFor(`document.querySelector('input[name="rate"]')?.value === "5"`)
	set := func(value string) { p.t.Helper(); p.write(`input[name="rate"]`, value) }
	set("2")
	p.waitFor(`document.getElementById("preview").textContent.includes("2/s")`)
	require.Contains(t, eval[string](p, `document.getElementById("preview").textContent`), "the last day's traffic")
	p.accessible()
	p.do(chromedp.Click("#save"))
	require.Equal(t, "5", rows.rate(t, "/ibe/AvailFare"), "not without a reason")
	p.do(chromedp.SendKeys("#why", "the upstream asks for it"), chromedp.Click("#save"))
	p.waitFor(`document.querySelector("#entries")?.textContent.includes("the upstream asks for it")`)
	p.waitFor(`document.getElementById("done").textContent.includes("Saved as change 1: Rate 5/s → 2/s")`) // a script shows it, later than the table
	require.Equal(t, "2", rows.rate(t, "/ibe/AvailFare"))
	require.Contains(t, eval[string](p, `document.querySelector("#entries").textContent`), "Rate 5/s → 2/s")

	_, err := rows.db.Exec("UPDATE t_ratelimite_conf SET rate = 9 WHERE name = '/ibe/AvailFare'")
	require.NoError(t, err)
	set("3")
	p.do(chromedp.SendKeys("#why", "late"), chromedp.Click("#save"))
	p.waitFor(`document.getElementById("error").textContent.includes("changed meanwhile. The audit table has no entry for that change")`)
	p.forgive("409")
	require.Equal(t, "Rate 2/s → 9/s", eval[string](p, `document.querySelector("#error li").textContent`))
	require.Equal(t, "9", rows.rate(t, "/ibe/AvailFare"))
	p.do(chromedp.Click("#error a"))
	p.waitFor(`document.querySelector('input[name="rate"]')?.value === "9"`)

	set("-4")
	p.do(chromedp.SendKeys("#why", "wrong"), chromedp.Click("#save"))
	p.waitFor(`document.getElementById("error").textContent.includes("want")`)
	p.forgive("422")

	set("4")
	p.do(chromedp.Click("#save"))
	p.waitFor(`document.querySelector("#entries")?.textContent.includes("Rate 9/s → 4/s")`)
	p.do(chromedp.Click(`#entries [data-act="undo"]`))
	p.waitFor(`document.querySelector("dialog[open]")?.textContent.includes("gets its values from before")`)
	p.do(chromedp.SendKeys(`dialog input[name="why"]`, "back"), chromedp.Click("dialog .danger"))
	p.waitFor(`document.querySelector("#entries")?.textContent.includes("undone by")`)
	require.Equal(t, "9", rows.rate(t, "/ibe/AvailFare"))
}

// A page with a wrong token changes nothing, and says so.
func TestWrongToken(t *testing.T) {
	at, rows := serveTable(t)
	p := open(t, at+"change?name=%2Fibe%2FAvailFare", signedIn())
	p.waitFor(`document.querySelector('input[name="rate"]')?.value === "5"`)
	p.do(chromedp.Evaluate(`document.querySelector('meta[name="csrf"]').content = "forged"`, nil),
		chromedp.SendKeys(`input[name="rate"]`, "7"), chromedp.SendKeys("#why", "x"), chromedp.Click("#save"))
	p.waitFor(`document.getElementById("error").textContent.includes("out of date")`)
	p.forgive("403")
	require.Equal(t, "5", rows.rate(t, "/ibe/AvailFare"))
}

// The replies that hold a row back are chosen from a list, and the default is NULL.
func TestPenaltyIsChosen(t *testing.T) {
	at, rows := serveTable(t)
	p := open(t, at+"change?name=%2Fibe%2FAvailFare", signedIn())
	p.waitFor(`document.querySelector('select[name="penalty"]')?.value === ""`)
	choose := func(value, done string) (is sql.NullString) {
		p.do(chromedp.SetValue(`select[name="penalty"]`, value, chromedp.ByQuery), chromedp.SendKeys("#why", "try"), chromedp.Click("#save"))
		p.waitFor(`document.getElementById("done")?.textContent.includes("` + done + `")`)
		require.NoError(t, rows.db.QueryRow("SELECT penalty FROM t_ratelimite_conf WHERE name = '/ibe/AvailFare'").Scan(&is))
		return is
	}
	require.Equal(t, sql.NullString{String: "429,503", Valid: true}, choose("429,503", "429 and 503"))
	p.waitFor(`document.querySelector('select[name="penalty"]')?.value === "429,503"`)
	p.accessible()
	require.Equal(t, sql.NullString{}, choose("", "429 and 503 → 503, and 429 if each key has a bucket"))
}

// The button for the shadow saves the edit of the form with it, under the reason of the edit.
func TestShadowButtonSavesTheEdit(t *testing.T) {
	at, rows := serveTable(t)
	p := open(t, at+"change?name=%2Fibe%2FAvailFare", signedIn())
	p.waitFor(`document.querySelector('input[name="rate"]')?.value === "5"`)
	p.write(`input[name="rate"]`, "2")
	p.do(chromedp.SendKeys("#why", "try 2/s"), chromedp.Click("#shadow"))
	p.waitFor(`document.getElementById("done").textContent.includes("Shadow no → yes") && document.getElementById("done").textContent.includes("Rate 5/s → 2/s")`)
	var rate, shadow string
	require.NoError(t, rows.db.QueryRow("SELECT CAST(rate AS TEXT), CAST(shadow AS TEXT) FROM t_ratelimite_conf").Scan(&rate, &shadow))
	require.Equal(t, []string{"2", "1"}, []string{rate, shadow})
	p.write(`input[name="rate"]`, "3")
	p.do(chromedp.SendKeys("#why", "in earnest"), chromedp.Click("#shadow"))
	p.waitFor(`document.getElementById("done").textContent.includes("Shadow yes → no") && document.getElementById("done").textContent.includes("Rate 2/s → 3/s")`)
}

// A conflict has its time in the reader's zone, and the undo of a change of the switch asks with what it does to the fleet.
func TestConflictTimeAndUndoOfTheSwitch(t *testing.T) {
	config, rows := withTable(t)
	p := open(t, serve(t, config)+"change?name=%2Fibe%2FAvailFare", signedIn(), emulation.SetTimezoneOverride("Asia/Tokyo"))
	p.waitFor(`document.querySelector('input[name="rate"]')?.value === "5"`)
	e := editorOf(t, rows.db)
	row, err := e.Get(t.Context(), "/ibe/AvailFare")
	require.NoError(t, err)
	_, err = e.Change(t.Context(), editor.Change{Name: "/ibe/AvailFare", From: row.Version, To: editor.Values{"rate": editor.Text(6)}, Who: "dan", Why: "peak"})
	require.NoError(t, err)
	p.write(`input[name="rate"]`, "7")
	p.do(chromedp.SendKeys("#why", "late"), chromedp.Click("#save"))
	p.waitFor(`/changed meanwhile by dan on .* GMT\+9 \(peak\)/.test(document.getElementById("error").textContent)`)
	p.forgive("409")

	_, err = rows.db.Exec(`INSERT INTO t_ratelimite_audit (changedBy, why, ofTable, name, fromRow, toRow) VALUES
		('dan', 'over', 't_ratelimite_switch', 'global', '{"name":"global","enabled":"0"}', '{"name":"global","enabled":"1"}')`)
	require.NoError(t, err)
	u := eval[string](p, `new URL("changes", location.href).href`)
	p.do(chromedp.Navigate(u))
	p.waitFor(`document.querySelector('#entries [data-turns="off"]')`)
	p.do(chromedp.Click(`#entries [data-turns="off"]`))
	p.waitFor(`document.querySelector("dialog[open]")?.textContent.includes("This turns the switch off. Every call of the whole fleet passes")`)
}

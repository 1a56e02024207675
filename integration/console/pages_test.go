package console_test

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/console/fleet/fleettest"
)

// The pages format numbers, durations, shares and names as the server does: by the same table.
func TestFormatsAgree(t *testing.T) {
	table, err := os.ReadFile("../../console/figure/testdata/figures.json")
	require.NoError(t, err)
	p := open(t, serve(t, console.Config{Source: fleettest.Example()}))
	p.live()
	wrong := eval[[][]string](p, `(async () => {
		const f = await import(document.querySelector("script[type=module]").src.replace("main.js", "format.js"));
		const format = { number: f.number, span: f.span, exact: f.exact, share: f.share, name: f.shown }, table = `+string(table)+`;
		return Object.entries(table).flatMap(([kind, rows]) => rows.filter(([v, want]) => format[kind](v) !== want).map(([v, want]) => [kind, String(v), format[kind](v), want]));
	})()`)
	require.Empty(t, wrong)
}

// The content of a page is in its address: every user who opens the address sees the same.
func TestSharedAddress(t *testing.T) {
	at := serve(t, console.Config{Source: fleettest.Example()})
	p := open(t, at+"?q=ibe&sort=name")
	p.live()
	p.waitFor(`document.getElementById("found").textContent === "2 of 10 limits"`)
	const first = `[...document.querySelectorAll(".virtual .row:not([hidden])")].find(r => r.dataset.index === "0").querySelector("a").textContent`
	require.Equal(t, "/ibe/AvailFare", eval[string](p, first))
	require.Equal(t, "ascending", eval[string](p, `document.querySelector('[data-sort="name"]').getAttribute("aria-sort")`))
	p.do(chromedp.Click(`[data-sort="name"] button`))
	p.waitFor(`location.search === "?q=ibe&sort=-name"`)
	require.Equal(t, "/ibe/Book", eval[string](p, first))
	p.write("#filter", "shadow")
	p.waitFor(`location.search === "?sort=-name&q=shadow"`)
	p.do(chromedp.Navigate(at + "?sort=constructor"))
	p.live()
	p.waitFor(`document.querySelector('[data-sort="refused"]').getAttribute("aria-sort") === "descending"`)

	p.do(chromedp.Navigate(at + "limit?name=%2Fibe%2FAvailFare&range=1d"))
	p.waitFor(`document.querySelector('#ranges [data-range="1d"]').getAttribute("aria-pressed") === "true"`)
	p.waitFor(`document.querySelectorAll("#marks li").length === 3`)
	p.do(chromedp.Click(`#ranges [data-range="1h"]`))
	p.waitFor(`location.search.endsWith("range=1h") && document.querySelectorAll("#marks li").length === 1`)
}

// The first page shows deviations on top, with links to the rows and instances concerned.
func TestStripLeads(t *testing.T) {
	p := open(t, serve(t, console.Config{Source: fleettest.Example()}))
	p.live()
	p.waitFor(`document.getElementById("strip").textContent.includes("limits refuse") && document.getElementById("strip").textContent.includes("2 limits have no traffic")`)
	texts := eval[[]string](p, `[...document.querySelectorAll("#strip a")].map(a => a.textContent)`)
	for _, want := range []string{"limits refuse", "/held/Upstream is held back for another 60 min", "/bad/Row has a row that is rejected", "limits have no traffic"} {
		require.Contains(t, strings.Join(texts, "\n"), want)
	}
	p.do(chromedp.Click(`#strip [href*="no+traffic"]`))
	p.waitFor(`document.getElementById("found")?.textContent === "2 of 10 limits" && document.getElementById("filter").value === "no traffic"`)
	p.do(chromedp.Click(`#strip [href*="held"]`))
	p.waitFor(`document.querySelector("h1").textContent === "/held/Upstream"`)
}

// The strip's texts follow the fleet, and its links stay where they are: a user may be about to click.
func TestStripKeepsItsLinks(t *testing.T) {
	source, began := fleettest.New(1, fleettest.Limit{Name: "/a", Rate: 3, Granted: 1}), time.Now()
	source.Adjust(func(i *fleet.Instance) {
		i.Faults = []fleet.Fault{{Limit: "/a", Bucket: "/a", By: "window", Err: "corrupt state", Since: began, Calls: 1}}
	})
	p := open(t, serve(t, console.Config{Source: source}))
	p.live()
	p.waitFor(`document.querySelector("#strip a span")?.textContent.startsWith("/a: its window cannot be used for")`)
	require.True(t, eval[bool](p, `(window.link = document.querySelector("#strip a")) && (window.was = link.textContent) !== ""`))
	p.waitFor(`link.textContent !== was`)
	require.True(t, eval[bool](p, `link.isConnected`))
	require.Contains(t, eval[string](p, `document.getElementById("problems").textContent`), "and 1 call has failed: corrupt state.")
	p.accessible()
}

// On a telephone legends lie under their charts, cells are wide enough for words, and buttons are whole.
func TestTelephone(t *testing.T) {
	at, rows := serveTable(t)
	edit := editorOf(t, rows.db)
	row, err := edit.Get(t.Context(), "/ibe/AvailFare")
	require.NoError(t, err)
	_, err = edit.Change(t.Context(), editor.Change{Name: row.Name, From: row.Version, Who: "ann", Why: "the upstream asks for it",
		To: editor.Values{"rate": editor.Text(6), "window": editor.Text(60), "window_limit": editor.Text(300)}})
	require.NoError(t, err)
	for _, colours := range []string{"light", "dark"} {
		p := open(t, at, signedIn(), chromedp.EmulateViewport(360, 740), scheme(colours))
		for _, page := range []string{"limit?name=%2Fibe%2FAvailFare", "health", "holders", "changes", "change?name=%2Fibe%2FAvailFare"} {
			p.do(chromedp.Navigate(at + page))
			p.waitFor(`document.documentElement.scrollWidth <= 360`)
			if strings.HasPrefix(page, "limit") {
				p.waitFor(`document.querySelectorAll("#shares tbody tr").length === 3 && document.querySelector("#chart canvas")`)
				p.waitFor(`document.querySelector(".u-legend").getBoundingClientRect().top >= document.querySelector("#chart .u-wrap").getBoundingClientRect().bottom - 1`)
				p.waitFor(`document.getElementById("chart").getBoundingClientRect().bottom >= document.querySelector(".u-legend").getBoundingClientRect().bottom - 1`)
			}
			require.Empty(t, eval[[]string](p, `[...document.querySelectorAll("main table:not(.u-legend) td")].filter(e => e.textContent.trim() && e.getBoundingClientRect().width < 70).map(e => e.textContent)`), page)
			require.Empty(t, eval[[]string](p, `[...document.querySelectorAll("button, a, input, td")].filter(e => e.offsetParent && !e.closest(".skip") && e.getBoundingClientRect().right > 361).map(e => e.outerHTML)`), page)
		}
	}
}

// A form has the control that fits, and writes what the column wants.
func TestFormWritesColumns(t *testing.T) {
	at, rows := serveTable(t)
	p := open(t, at+"change?name=%2Fibe%2FAvailFare", signedIn())
	p.waitFor(`document.getElementById("now")?.textContent.includes("traffic")`)
	require.Equal(t, "500", eval[string](p, `document.querySelector('[name="max_wait"]').value`))
	p.write(`[name="max_wait"]`, "125")
	p.do(chromedp.Click(`[name="shadow"]`))
	p.waitFor(`document.getElementById("preview").textContent.includes("in shadow: 5/s, saves up 5, waits up to 125 ms")`)
	p.write(`[name="concurrent"]`, "1")
	p.waitFor(`document.getElementById("preview").textContent.includes("is not known: the history does not show how many calls ran at once") || document.getElementById("preview").textContent.includes("how many more is not known")`)
	p.write(`[name="rate"]`, "-3")
	p.waitFor(`document.querySelector("#preview .error")?.textContent.startsWith("Rate -3/s: want")`)
	require.NotContains(t, eval[string](p, `document.getElementById("preview").textContent`), "every call passes")
	p.write(`[name="rate"]`, "5")
	p.write(`[name="concurrent"]`, " ")
	p.do(chromedp.SendKeys("#why", "tried"), chromedp.Click("#save"))
	p.waitFor(`document.getElementById("done").textContent.includes("Shadow no → yes, Max wait 500 ms → 125 ms")`)
	var wait, shadow string
	require.NoError(t, rows.db.QueryRow("SELECT CAST(max_wait AS TEXT), CAST(shadow AS TEXT) FROM t_ratelimite_conf").Scan(&wait, &shadow))
	require.Equal(t, []string{"0.125", "1"}, []string{wait, shadow})
}

// A name that turns the text round or ends the line is shown with these characters escaped.
func TestTurnedNames(t *testing.T) {
	const name = "/a\u202egnp.\nexe"
	at := serve(t, console.Config{Source: fleettest.New(1, fleettest.Limit{Name: name, Rate: 3, Granted: 1, Refused: 2, Keys: []string{name}})})
	p := open(t, at)
	p.live()
	p.waitFor(`document.querySelector(".virtual .c-name a")`)
	const shown = `/a\u202egnp.\nexe`
	require.Equal(t, shown, eval[string](p, `document.querySelector(".virtual .c-name a").textContent`))
	p.do(chromedp.Click(".virtual .c-name a"))
	p.waitFor(`document.querySelector("#keys td.code")`)
	p.live()
	require.Equal(t, shown, eval[string](p, `document.querySelector("h1").textContent`))
	require.Equal(t, shown, eval[string](p, `document.querySelector("#keys td.code").textContent`))
	require.Contains(t, eval[string](p, `document.title`), shown)
	require.False(t, eval[bool](p, `document.body.innerText.includes("\u202e")`))
}

// At 1400 pixels no tag of a state is cut off, also if a limit has several or its penalty ends on another day.
func TestTagsFit(t *testing.T) {
	source := fleettest.New(1,
		fleettest.Limit{Name: "/a", Rate: 3, Granted: 1, Refused: 2, Held: 49 * time.Hour},
		fleettest.Limit{Name: "/b", Rate: 3, Held: 49 * time.Hour, Shadow: true},
		fleettest.Limit{Name: "/c", Rejected: &fleet.Rejected{Row: "17", Name: "/c", Field: "rate", Value: "NULL", Want: "a number"}})
	p := open(t, serve(t, console.Config{Source: source}), chromedp.EmulateViewport(1400, 900))
	p.waitFor(`[...document.querySelectorAll("#rows .tag")].filter(e => e.textContent.startsWith("penalised until")).length === 2 && document.querySelector('#rows .tag[data-word="no traffic"]')`)
	cut := `[...document.querySelectorAll("#rows .tag")].filter(e => { const r = e.getBoundingClientRect(), c = e.parentNode.getBoundingClientRect(); return e.offsetParent && (e.scrollWidth > e.clientWidth + 1 || r.right > c.right + 1 || r.bottom > c.bottom + 1 || r.bottom > e.closest(".row").getBoundingClientRect().bottom); }).map(e => e.textContent)`
	require.Empty(t, eval[[]string](p, cut))
	p.do(chromedp.EmulateViewport(1100, 900))
	p.waitFor(`[...document.querySelectorAll("#rows .row:not([hidden])")].every(e => e.scrollWidth <= e.clientWidth)`)
}

// The filter "/s" finds names, and not every rate; names that differ in blanks only look different.
func TestNamesAndRatesInTheFilter(t *testing.T) {
	source := fleettest.New(1, fleettest.Limit{Name: "/search", Rate: 3}, fleettest.Limit{Name: "/a", Rate: 3}, fleettest.Limit{Name: "/a ", Rate: 3}, fleettest.Limit{Name: " ", Rate: 3})
	p := open(t, serve(t, console.Config{Source: source}))
	p.live()
	names := `[...document.querySelectorAll("#rows .row:not([hidden]) .c-name a")].map(e => e.textContent).sort().join("|")`
	p.waitFor(names + ` === "/a|/a\\x20|/search|\\x20"`)
	p.write("#filter", "/s")
	p.waitFor(names + ` === "/search"`)
	p.write("#filter", "3/s")
	p.waitFor(names + `.split("|").length === 4`)
}

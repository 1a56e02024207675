package console_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/console/fleet/fleettest"
)

// A table that becomes empty: the list is empty and says so in red, the totals have the calls that pass, and the page is live. When the
// limits are back it is as before.
func TestEmptyTableInABrowser(t *testing.T) {
	source := fleettest.New(2, fleettest.Limit{Name: "/ibe/AvailFare", Rate: 5, Granted: 5})
	began := time.Now()
	source.Adjust(func(i *fleet.Instance) { i.Others = fleet.Counters{Passed: int64(90 * time.Since(began).Seconds())} })
	p := open(t, serve(t, console.Config{Source: source}))
	p.waitFor(`document.querySelector(".virtual .c-rate")?.textContent === "5"`)
	p.waitFor(`Number(document.querySelector('#others [data-total="unlimited"]').textContent.replaceAll(",", "")) > 100`) // 180/s of two
	require.False(t, eval[bool](p, `document.getElementById("others").classList.contains("bad")`))
	source.Set()
	p.waitFor(`document.getElementById("found").textContent === "0 limits"`)
	p.waitFor(`/There are no limits: [0-9.]+ calls a second pass without one/.test(document.querySelector(".none").textContent)`)
	require.Equal(t, eval[string](p, `getComputedStyle(document.querySelector(".none .bad")).color`), eval[string](p, `getComputedStyle(document.getElementById("others")).color`))
	require.NotEqual(t, eval[string](p, `getComputedStyle(document.getElementById("found")).color`), eval[string](p, `getComputedStyle(document.querySelector(".none .bad")).color`))
	require.Zero(t, eval[int](p, `document.querySelectorAll(".virtual .row:not([hidden]):not(.none)").length`), "nothing of before")
	p.waitFor(`document.getElementById("problems").textContent.includes("There are no limits")`)
	p.waitFor(`Number(document.querySelector('#totals [data-total="granted"]').textContent.replaceAll(",", "")) > 100`)
	require.Equal(t, "live", eval[string](p, `document.getElementById("live").dataset.state`))
	p.accessible()
	source.Set(fleettest.Limit{Name: "/ibe/AvailFare", Rate: 6, Granted: 5})
	p.waitFor(`document.querySelector(".virtual .row:not([hidden]) .c-rate")?.textContent === "6"`)
	p.waitFor(`document.getElementById("problems").hidden && !document.querySelector(".none")`)
}

// A loss is shown above every page, the form and the changes too, until it is over; a user with the right to write confirms it there.
func TestLossInABrowser(t *testing.T) {
	source := fleettest.Example()
	lost := func(i *fleet.Instance) {
		i.Loads.Gone, i.Loads.Before, i.Loads.Lost, i.Loads.Names = 16, 17, time.Now().Add(-time.Minute), "/ibe/Old"
	}
	var confirmed atomic.Value
	config, _ := withTable(t)
	config.Source = source
	config.Confirm = func(_ context.Context, who, why string) error {
		confirmed.Store(who + ": " + why)
		source.Adjust(nil)
		return nil
	}
	at := serve(t, config)
	banner := `document.getElementById("problems").textContent.includes("16 of 17 limits are gone from the table")`
	for _, page := range []string{"", "limit?name=%2Fibe%2FAvailFare", "change?name=%2Fibe%2FAvailFare", "changes", "holders", "health"} {
		p := open(t, at+page, signedIn())
		p.live()
		require.False(t, eval[bool](p, banner), page)
		source.Adjust(lost)
		p.waitFor(banner)
		require.Equal(t, "Confirm …", eval[string](p, `document.querySelector('#problems [data-act="confirm"]').textContent`), page)
		p.accessible()
		source.Adjust(nil)
		p.waitFor("!" + banner)
		p.do(chromedp.Navigate("about:blank")) // six streams are all that a browser has for one host
	}
	source.Adjust(lost)
	reader := open(t, at)
	reader.waitFor(banner)
	require.Zero(t, eval[int](reader, `document.querySelectorAll('[data-act="confirm"]').length`), "who may only look")
	reader.do(chromedp.Navigate("about:blank"))
	p := open(t, at+"changes", signedIn())
	p.waitFor(banner)
	p.do(chromedp.Click(`[data-act="confirm"]`))
	p.waitFor(`document.querySelector("dialog[open]")`)
	p.do(chromedp.SendKeys(`dialog input[name="why"]`, "they have moved"), chromedp.Click("dialog .danger"))
	p.waitFor(`document.readyState === "complete" && !` + banner)
	require.Equal(t, "ann: they have moved", confirmed.Load())
}

// A limit that a person holds back says until when, by whom and why; uses of windows and places are in the list.
func TestWhoAndHowMuchInABrowser(t *testing.T) {
	source := fleettest.Example()
	source.Happen(fleet.Event{At: time.Now(), Kind: fleet.Penalized, Limit: "/held/Upstream", For: time.Hour, Who: "ann", Why: "they ring"})
	source.Adjust(func(i *fleet.Instance) {
		i.Windows = []fleet.Window{{Name: "/ibe/Book", Limit: 10_000, Used: 312, Length: 24 * time.Hour}}
		i.Semaphores = []fleet.Semaphore{{Name: "/ibe/Book", Permits: 8, Used: 7}}
	})
	at := serve(t, console.Config{Source: source})
	p := open(t, at)
	p.live()
	p.waitFor(`[...document.querySelectorAll(".virtual .c-name small")].some(e => e.textContent.endsWith("312 of 10,000 in 1 d, 7 of 8 at once"))`)
	// One tag, whichever day it is then: a date has commas.
	p.waitFor(`[...document.querySelectorAll('.tag[data-word="penalised"]')].some(e => /^penalised until .*\d\d:\d\d/.test(e.textContent))`)
	require.Contains(t, eval[string](p, `document.querySelector('.tag[data-word="penalised"]').parentElement.title`), "by ann: they ring")
	p.do(chromedp.EmulateViewport(360, 740), chromedp.Navigate(at+"?q=penalised"))
	p.live()
	p.waitFor(`document.querySelector('.virtual .tag[data-word="penalised"]')`)
	p.waitFor(`(a => a.textContent === "/held/Upstream" && a.scrollWidth <= a.parentElement.clientWidth)(document.querySelector(".virtual .c-name a"))`) // the time leaves room for the name
	p.do(chromedp.EmulateViewport(1280, 900), chromedp.Navigate(at+"limit?name=%2Fheld%2FUpstream"))
	p.live()
	p.waitFor(`/^Held back until .*, by ann: they ring\.$/.test(document.getElementById("held").textContent) && !document.getElementById("held").hidden`)
	p.waitFor(`document.getElementById("marks").textContent.includes("held back for 60 min, by ann: they ring")`)
}

// withoutHistory is a fleet whose history cannot be read.
type withoutHistory struct{ *fleettest.Fleet }

func (withoutHistory) History(context.Context, string, time.Time) ([]fleet.Point, error) {
	return nil, errors.New("connection refused")
}

// A chart whose request fails does not show that there were no events.
func TestEventsThatCannotBeRead(t *testing.T) {
	p := open(t, serve(t, console.Config{Source: withoutHistory{fleettest.Example()}})+"limit?name=%2Fibe%2FAvailFare")
	p.waitFor(`document.getElementById("marks").textContent === "Not known: The history cannot be read: connection refused"`)
	p.forgive("502")
}

// Calls that a shadow would refuse are named so in the list and on the limit's page.
func TestShadowIsNotRefused(t *testing.T) {
	at := serve(t, console.Config{Source: fleettest.Example()})
	p := open(t, at)
	p.waitFor(`[...document.querySelectorAll("#rows .row")].some(r => r.dataset.name === "/trial/Search" && /^\(.*\)$/.test(r.querySelector(".c-refused").textContent) && !r.querySelector(".c-refused").classList.contains("bad"))`)
	p.do(chromedp.Navigate(at + "limit?name=%2Ftrial%2FSearch"))
	p.waitFor(`document.querySelector("#shares [data-refused]").textContent === "Would refuse/s" && document.querySelector(".u-legend")?.textContent.includes("Would be refused")`)
	p.do(chromedp.Navigate(at + "limit?name=%2Fibe%2FAvailFare"))
	p.waitFor(`document.querySelector("#shares [data-refused]").textContent === "Refused/s" && document.querySelector(".u-legend")?.textContent.includes("Refused")`)
}

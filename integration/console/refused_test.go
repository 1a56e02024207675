package console_test

import (
	"testing"
	"time"

	"github.com/chromedp/chromedp"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/console/fleet/fleettest"
)

// What refuses the calls of a limit is in the strip, in the list and on the limit's page, which draws the use of its window, too.
func TestRefusedByWindow(t *testing.T) {
	source := fleettest.New(1, fleettest.Limit{Name: "/billing", Rate: 3, Granted: 1, Refused: 2})
	source.Adjust(func(i *fleet.Instance) {
		i.Refusals = []fleet.Refusal{{Limit: "/billing", By: "window", Count: i.Limits["/billing"].Refused}}
		i.Windows = []fleet.Window{{Name: "/billing", Limit: 100, Used: 100, Length: time.Hour}}
	})
	p := open(t, serve(t, console.Config{Source: source}))
	p.live()
	p.waitFor(`document.getElementById("strip").textContent.includes("/billing refuses, by: window")`)
	p.waitFor(`document.getElementById("rows").textContent.includes("refused by: window · 100 of 100 in 1 h")`)
	p.do(chromedp.Click(`#strip [href*="billing"]`))
	p.waitFor(`[...document.querySelectorAll("#tiles div")].some((t) => t.textContent.includes("Refused") && t.textContent.endsWith("/s, by: window"))`)
	p.waitFor(`document.querySelector("#tiles .trend path").getAttribute("d").startsWith("M") && document.querySelector("#tiles .trend").getBoundingClientRect().width > 40`)
}

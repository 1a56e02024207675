package console_test

import (
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/console/fleet/fleettest"
)

// The page of a limit gets a table by priority when the first call below Normal comes, and fits a telephone with it.
func TestTableByPriority(t *testing.T) {
	source := fleettest.New(1, fleettest.Limit{Name: "/fares", Rate: 30, Granted: 30, Refused: 20, Waiting: 7})
	p := open(t, serve(t, console.Config{Source: source})+"limit?name=%2Ffares", chromedp.EmulateViewport(1280, 900))
	p.live()
	p.waitFor(`document.getElementById("tiles").textContent.includes("Waiting now") && document.getElementById("priorities-card").getBoundingClientRect().height === 0`)
	source.Adjust(func(i *fleet.Instance) { // half of the calls that are granted or wait, and all refusals
		all := i.Limits["/fares"]
		i.Priorities = []fleet.Priority{{Limit: "/fares", Name: "lowest", Waiting: 3, Counters: fleet.Counters{Granted: all.Granted / 2, Refused: all.Refused, Waited: all.Waited / 2,
			Waits: fleet.Histogram{4: all.Waited / 2}}}}
	})
	p.waitFor(`document.getElementById("priorities-card").getBoundingClientRect().height > 0`)
	p.waitFor(`(() => {
		const [normal, lowest] = [...document.getElementById("priorities").tBodies[0].rows].map((r) => [...r.cells].map((c) => c.textContent));
		return normal[0] === "normal" && normal[1] > 5 && normal[2] < 1 && normal[3] === "4" && / ms$/.test(normal[4])
			&& lowest[0] === "lowest" && lowest[1] > 5 && lowest[2] > 5 && lowest[3] === "3" && /^(1\d|20)[.\d]* ms$/.test(lowest[4]);
	})()`)
	p.accessible()
	p.do(chromedp.EmulateViewport(360, 740))
	p.waitFor(`document.documentElement.scrollWidth <= 360`)
	p.accessible()
}

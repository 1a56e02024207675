package console_test

import (
	"context"
	"testing"
	"time"

	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/console/fleet/fleettest"
)

// young is a fleet that has been there for three minutes.
type young struct{ *fleettest.Fleet }

func (young) History(_ context.Context, _ string, _ time.Time) (all []fleet.Point, _ error) {
	for i := range 4 {
		at := time.Now().Truncate(fleet.Minute).Add(time.Duration(i-3) * fleet.Minute)
		all = append(all, fleet.Point{Minute: at, Published: true, Granted: 60, Rate: 5})
	}
	return all, nil
}

// No label of a chart is cut at the chart's edge, and none touches the next one.
func TestChartLabels(t *testing.T) {
	const record = `window.drawn = [];
const fill = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  if (/^\d\d:\d\d/.test(text)) {
    const at = new DOMPoint(x, y).matrixTransform(this.getTransform()), half = this.measureText(text).width / 2;
    drawn.push({ text, y: Math.round(at.y), from: at.x - half, to: at.x + half, edge: this.canvas.width });
  }
  return fill.apply(this, arguments);
};`
	at := serve(t, console.Config{Source: young{fleettest.Example()}})
	p := open(t, at+"limit?name=%2Fibe%2FAvailFare", chromedp.EmulateViewport(1200, 1150), chromedp.ActionFunc(func(ctx context.Context) error {
		_, err := page.AddScriptToEvaluateOnNewDocument(record).Do(ctx)
		return err
	}))
	p.waitFor(`document.querySelectorAll("#chart canvas").length === 1 && drawn.length > 1`)
	drawn := eval[[]struct {
		Text           string
		Y              int
		From, To, Edge float64
	}](p, "drawn")
	for i, d := range drawn {
		require.LessOrEqual(t, d.To, d.Edge, d.Text)
		require.GreaterOrEqual(t, d.From, 0.0, d.Text)
		if i > 0 && drawn[i-1].From < d.From && drawn[i-1].Y == d.Y {
			require.GreaterOrEqual(t, d.From-drawn[i-1].To, 6.0, "%s and %s", drawn[i-1].Text, d.Text)
		}
	}
}

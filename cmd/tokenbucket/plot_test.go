package main

import (
	"encoding/xml"
	"errors"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/jonboulle/clockwork"
	"github.com/stretchr/testify/require"
)

var pictureNames = []string{"three-gateways", "priority", "warmup-curve", "permits-over-time"}

func TestPlot(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{
		"default":      nil,
		"fast":         {"--rate", "1e7", "--warmup", "24h"},
		"slow":         {"--rate", "0.001", "--warmup", "1us"},
		"nearly flat":  {"--cold-factor", "1.001"},
		"nearly steep": {"--cold-factor", "1000"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := filepath.Join(t.TempDir(), "new", "folder")
			for _, format := range []string{"svg", "png"} {
				status, out, stderr := execute(t.Context(), append([]string{"plot", "--out", dir, "--format", format}, args...)...)
				require.Equal(t, exitOK, status, stderr)
				for _, picture := range pictureNames {
					file := filepath.Join(dir, picture+"."+format)
					require.Contains(t, out, file)
					parsePicture(t, file)
				}
			}
		})
	}
}

func parsePicture(t *testing.T, file string) {
	f, err := os.Open(file)
	require.NoError(t, err)
	defer f.Close()
	if strings.HasSuffix(file, ".png") {
		img, err := png.Decode(f)
		require.NoError(t, err)
		require.Equal(t, 1080, img.Bounds().Dx())
		return
	}
	texts := 0
	for d := xml.NewDecoder(f); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		if e, ok := token.(xml.StartElement); ok && e.Name.Local == "text" {
			texts++
		}
	}
	require.Greater(t, texts, 10, "ticks, labels and legend")
}

// The pictures that the README shows are what the command draws now.
func TestPicturesInDocs(t *testing.T) {
	dir := t.TempDir()
	status, _, stderr := execute(t.Context(), "plot", "--rate", "5", "--warmup", "4s", "--out", dir)
	require.Equal(t, exitOK, status, stderr)
	for _, picture := range pictureNames {
		want, err := os.ReadFile(filepath.Join(dir, picture+".svg"))
		require.NoError(t, err)
		got, err := os.ReadFile(filepath.Join("..", "..", "docs", picture+".svg"))
		require.NoError(t, err)
		require.True(t, string(want) == string(got), "%s.svg is old: run tokenbucket plot --out docs at the root", picture)
	}
}

// At 5/s with 4 s to warm up and a cold factor of 3, ten of the twenty stored permits lie above the threshold. They cost
// the warm-up period, which the eleventh waits for, and the next ones follow every 200 ms.
func TestHandedOut(t *testing.T) {
	p := pictures{rate: 5, warmup: 4 * time.Second, coldFactor: 3}
	limiter, err := p.warmingUp(tokenbucket.WithClock(clockwork.NewFakeClock()))
	require.NoError(t, err)
	points, err := p.handedOut(limiter, p.span())
	require.NoError(t, err)
	require.Equal(t, at(0, 0), points[0])
	require.Equal(t, at(0, 1), points[1], "the first at once")
	require.InDelta(t, 0.58, points[2].X, 1e-9, "cold: halfway between 600 ms and 560 ms, what the first costs")
	require.Equal(t, 11.0, points[11].Y)
	require.InDelta(t, 4, points[11].X, 1e-9)
	require.InDelta(t, 0.2, points[12].X-points[11].X, 1e-9)
	last := points[len(points)-1]
	require.InDelta(t, 10, last.X, 1e-9)
	require.Equal(t, 41.0, last.Y)
}

func TestTicks(t *testing.T) {
	for _, hi := range []float64{1e-6, 0.07, 1, 3, 9.99, 10, 24, 810, 2.2e12} {
		marks := ticks(0, hi)
		require.GreaterOrEqual(t, len(marks), 5, "to %v", hi)
		require.LessOrEqual(t, len(marks), 13, "to %v", hi)
		require.LessOrEqual(t, marks[len(marks)-1].Value, hi)
	}
}

// The first picture: whoever joins, the fleet gets no more than the limit, and whoever offers calls gets a share.
func TestFleetCalls(t *testing.T) {
	passed, err := fleetCalls()
	require.NoError(t, err)
	for phase := range fleetGateways {
		var share [fleetGateways]float64
		for second := phase * fleetStep; second < (phase+1)*fleetStep; second++ {
			all := 0.0
			for i := range passed {
				all += passed[i][second]
				share[i] += passed[i][second]
			}
			require.Equal(t, float64(fleetRate), all, "second %d", second)
		}
		for i := range share {
			require.Equal(t, i <= phase, share[i] > 0, "gateway %d after %d s", i+1, phase*fleetStep)
		}
	}
}

// The picture of priorities: the rate is used in every second. Bookings have hardly any of it beside searches of the same priority, and all
// that they ask for, beside those of the lowest.
func TestSharedCalls(t *testing.T) {
	bookings, searches, err := sharedCalls()
	require.NoError(t, err)
	const half = sharedSeconds / 2
	before, after := 0.0, 0.0
	for second := range sharedSeconds {
		require.InDelta(t, sharedRate, bookings[second]+searches[second], 1, "second %d", second)
		if second < half {
			before += bookings[second]
		} else {
			after += bookings[second]
		}
	}
	require.Less(t, before, 0.1*half*bookingsPer)
	require.Greater(t, after, 0.9*half*bookingsPer)
}

package console_test

import (
	"bufio"
	"bytes"
	"context"
	"image"
	"image/draw"
	"image/png"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"
)

// startDemo starts tokenbucket demo --console, and returns its address and token.
func startDemo(t *testing.T) (at, token string) {
	program := filepath.Join(t.TempDir(), "tokenbucket")
	build := exec.Command("go", "build", "-o", program, "./tokenbucket")
	build.Dir = "../../cmd"
	out, err := build.CombinedOutput()
	require.NoError(t, err, "%s", out)
	ctx, cancel := context.WithCancel(context.Background())
	demo := exec.CommandContext(ctx, program, "demo", "--console", "--console-listen", "127.0.0.1:0")
	demo.Cancel = func() error { return demo.Process.Signal(syscall.SIGTERM) }
	demo.WaitDelay = 10 * time.Second
	stdout, err := demo.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, demo.Start())
	t.Cleanup(func() { cancel(); _ = demo.Wait() })
	lines := bufio.NewScanner(stdout)
	for (at == "" || token == "") && lines.Scan() {
		switch f := strings.Fields(lines.Text()); {
		case len(f) == 2 && f[0] == "console":
			at = f[1]
		case len(f) == 2 && f[0] == "token":
			token = f[1]
		}
	}
	require.NotEmpty(t, token)
	go func() {
		for lines.Scan() { // until it ends
		}
	}()
	return at, token
}

// A newcomer sees moving charts, and changes a limit. With TOKENBUCKET_PICTURES the pictures of docs/console.md are taken on the way:
//
//	TOKENBUCKET_PICTURES=../../docs go test ./console -run TestDemo
func TestDemo(t *testing.T) {
	if testing.Short() {
		t.Skip("builds the demo, and looks at it for a while")
	}
	at, token := startDemo(t)
	dir := os.Getenv("TOKENBUCKET_PICTURES")
	history, look := time.Second, 500*time.Millisecond
	if dir != "" {
		history, look = 150*time.Second, 5*time.Second
	}
	user := network.SetExtraHTTPHeaders(network.Headers{"Authorization": "Bearer " + token})
	p := open(t, at, user, chromedp.EmulateViewport(1200, 760), scheme("light"))
	p.live()
	p.waitFor(`document.getElementById("found").textContent === "10 limits"`)
	p.waitFor(`document.querySelector(".virtual .c-refused.bad")`)
	time.Sleep(history)
	take := func(name, path, colours string, w, h int64) {
		p := open(t, at+path, user, chromedp.EmulateViewport(w, h), emulation.SetLocaleOverride().WithLocale("en-GB"), scheme(colours))
		time.Sleep(look)
		if dir != "" {
			require.NoError(t, p.small(filepath.Join(dir, "console-"+name+".png")))
		}
		p.do(chromedp.Navigate("about:blank")) // six streams are all that a browser has for one host
	}
	const limit = "limit?name=%2Fibe%2FAvailFare"
	take("limits", "", "light", 1200, 700)
	take("limit", limit+"&range=15m", "light", 1200, 1000)
	take("warm-up", "limit?name=%2Fcold%2FReport", "dark", 1200, 1000)
	take("narrow", "", "dark", 360, 760)
	take("semaphores", "holders", "light", 1000, 540)

	p.do(page.BringToFront(), chromedp.EmulateViewport(1200, 860), chromedp.Navigate(at+"change?name="+url.QueryEscape("/ibe/AvailFare")))
	p.waitFor(`document.querySelector('input[name="rate"]')?.value === "5"`)
	p.write(`input[name="rate"]`, "8")
	p.waitFor(`document.getElementById("preview").textContent.includes("8/s")`)
	p.do(chromedp.SendKeys("#why", "more of them were agreed"))
	p.waitFor(`document.getElementById("now").textContent.includes("traffic") || document.getElementById("now").textContent.includes("whole minute")`)
	if dir != "" {
		require.NoError(t, p.small(filepath.Join(dir, "console-change.png")))
	}
	changed := time.Now()
	p.do(chromedp.Click("#save"))
	p.waitFor(`document.querySelector("#entries")?.textContent.includes("Rate 5/s → 8/s")`)
	p.do(chromedp.Navigate(at + limit))
	p.waitFor(`document.querySelector("#tiles dd")?.textContent === "8"`)
	t.Logf("in force, and seen, %v after it was saved", time.Since(changed).Round(100*time.Millisecond))
	take("health", "health", "light", 1200, 800)
}

// small takes a picture with few colours, which a page of docs loads at once.
func (p *tab) small(path string) error {
	var text []byte
	if err := chromedp.Run(p.ctx, chromedp.CaptureScreenshot(&text)); err != nil {
		return err
	}
	taken, err := png.Decode(bytes.NewReader(text))
	if err != nil {
		return err
	}
	few := image.NewPaletted(taken.Bounds(), colours(taken))
	draw.Draw(few, few.Bounds(), taken, taken.Bounds().Min, draw.Src)
	var out bytes.Buffer
	if err := (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, few); err != nil {
		return err
	}
	return os.WriteFile(path, out.Bytes(), 0o644)
}

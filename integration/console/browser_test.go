package console_test

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// chromium is the one browser of this package's tests.
var chromium = struct {
	sync.Once
	ctx  context.Context
	stop func()
	err  error
}{}

func TestMain(m *testing.M) {
	code := m.Run()
	if chromium.stop != nil {
		chromium.stop()
	}
	os.Exit(code)
}

// quiet keeps what this chromedp does not know of a newer browser out of the output.
var quiet = chromedp.WithErrorf(func(string, ...any) {})

func startChromium() {
	home, err := os.MkdirTemp("", "console-browser")
	if err != nil {
		chromium.err = err
		return
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox, chromedp.UserDataDir(filepath.Join(home, "profile")),
		chromedp.Flag("lang", "en-GB"), chromedp.Flag("force-color-profile", "srgb"), chromedp.WSURLReadTimeout(time.Minute))
	allocator, stopAllocator := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, stop := chromedp.NewContext(allocator, quiet, chromedp.WithBrowserOption(chromedp.WithDialTimeout(time.Minute)))
	chromium.err = chromedp.Run(ctx)
	chromium.ctx = ctx
	chromium.stop = func() { stop(); stopAllocator(); _ = os.RemoveAll(home) }
}

// tab is one page of the browser, and what it has complained about.
type tab struct {
	t   *testing.T
	ctx context.Context
	own string // the host that it may ask

	mu         sync.Mutex
	complaints []string
	requests   int
	slowest    time.Duration // answer of the page when it was asked for something that takes no time
}

// open opens a page. When the test ends it must not have complained, nor have asked another host.
func open(t *testing.T, address string, before ...chromedp.Action) *tab {
	redistest.Program(t, "chromium")
	chromium.Do(startChromium)
	require.NoError(t, chromium.err)
	u, err := url.Parse(address)
	require.NoError(t, err)
	ctx, stop := chromedp.NewContext(chromium.ctx)
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	p := &tab{t: t, ctx: ctx, own: u.Host}
	chromedp.ListenTarget(ctx, p.listen)
	t.Cleanup(func() {
		if t.Failed() {
			p.picture(filepath.Join(os.TempDir(), "failed-"+strings.ReplaceAll(t.Name(), "/", "-")+".png"))
		}
		cancel()
		stop()
		p.mu.Lock()
		defer p.mu.Unlock()
		require.Empty(t, p.complaints)
		require.Positive(t, p.requests)
	})
	p.do(network.Enable(), runtime.Enable(), log.Enable())
	p.do(before...)
	p.do(chromedp.Navigate(address))
	return p
}

func (p *tab) listen(event any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		p.requests++
		if u, err := url.Parse(e.Request.URL); err != nil || u.Host != p.own && u.Scheme != "data" && u.Scheme != "about" {
			p.complaints = append(p.complaints, "asked another host: "+e.Request.URL)
		}
	case *runtime.EventExceptionThrown:
		p.complaints = append(p.complaints, e.ExceptionDetails.Error())
	case *runtime.EventConsoleAPICalled:
		if e.Type == runtime.APITypeError || e.Type == runtime.APITypeWarning {
			text := string(e.Type)
			for _, a := range e.Args {
				text += " " + string(a.Value) + a.Description
			}
			p.complaints = append(p.complaints, text)
		}
	case *log.EventEntryAdded:
		if e.Entry.Level == log.LevelError || e.Entry.Level == log.LevelWarning {
			p.complaints = append(p.complaints, string(e.Entry.Level)+" "+e.Entry.Text+" "+e.Entry.URL)
		}
	}
}

// forgive takes back complaints that were meant to come.
func (p *tab) forgive(part string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var left []string
	for _, c := range p.complaints {
		if !strings.Contains(c, part) {
			left = append(left, c)
		}
	}
	require.Less(p.t, len(left), len(p.complaints), "no complaint with %q", part)
	p.complaints = left
}

func (p *tab) do(actions ...chromedp.Action) {
	p.t.Helper()
	require.NoError(p.t, chromedp.Run(p.ctx, actions...))
}

// eval returns the value of an expression.
func eval[T any](p *tab, expression string) T {
	p.t.Helper()
	var v T
	p.do(chromedp.Evaluate(expression, &v, func(e *runtime.EvaluateParams) *runtime.EvaluateParams { return e.WithAwaitPromise(true) }))
	return v
}

// waitFor waits until an expression is true.
func (p *tab) waitFor(expression string) {
	p.t.Helper()
	require.Eventually(p.t, func() bool {
		var v bool
		began := time.Now()
		err := chromedp.Run(p.ctx, chromedp.Evaluate("!!("+expression+")", &v))
		p.mu.Lock()
		defer p.mu.Unlock()
		p.slowest = max(p.slowest, time.Since(began))
		return err == nil && v
	}, time.Minute, 50*time.Millisecond, "%s", expression)
}

// within fails the test if the wait takes longer than a person would accept. A slow machine gets more time: by its load, and by the page's
// reply times, since the page sends several requests before it shows a change.
func (p *tab) within(most time.Duration, what string, wait func()) {
	p.t.Helper()
	p.mu.Lock()
	p.slowest = 0
	p.mu.Unlock()
	busy, began := redistest.Busy(), time.Now()
	wait()
	took := time.Since(began)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.t.Logf("%s after %v, when the page answered within %v", what, took.Round(10*time.Millisecond), p.slowest.Round(time.Millisecond))
	require.Less(p.t, took, time.Duration(float64(most)*max(busy, redistest.Busy()))+10*p.slowest, what)
}

// write replaces what a field says.
func (p *tab) write(field, text string) {
	p.t.Helper()
	p.do(chromedp.Evaluate(`document.querySelector(`+"`"+field+"`"+`).select()`, nil), chromedp.KeyEvent("\b"), chromedp.SendKeys(field, text))
}

func (p *tab) picture(path string) {
	var png []byte
	if chromedp.Run(p.ctx, chromedp.CaptureScreenshot(&png)) == nil {
		require.NoError(p.t, os.WriteFile(path, png, 0o644))
	}
}

// serve serves a console under a prefix.
func serve(t *testing.T, config console.Config) (address string) {
	if config.Beat == 0 {
		config.Beat = 500 * time.Millisecond
	}
	config.Log = slog.New(slog.DiscardHandler)
	c, err := console.New(config)
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle("/console/", http.StripPrefix("/console", c))
	server := httptest.NewServer(mux)
	t.Cleanup(func() { c.Close(); server.Close() })
	return server.URL + "/console/"
}

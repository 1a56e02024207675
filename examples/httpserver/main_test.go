package main

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// output is what a program prints; it can be looked at while it runs.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) url(t *testing.T) (url string) {
	require.Eventually(t, func() bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		url = regexp.MustCompile(`http://[^/]+`).FindString(o.text.String())
		return url != ""
	}, 30*time.Second, time.Millisecond)
	return url
}

func serve(t *testing.T, o options) (url string) {
	o.listen, o.limit, o.window, o.paths = "127.0.0.1:0", 3, time.Hour, 100
	ctx, stop := context.WithCancel(t.Context())
	out, ended := new(output), make(chan error, 1)
	go func() { ended <- run(ctx, o, out) }()
	t.Cleanup(func() {
		stop()
		require.NoError(t, <-ended)
	})
	return out.url(t)
}

// Three calls of a path pass, with one server or several; the fourth gets a Retry-After. Other paths are not limited.
func TestServers(t *testing.T) {
	for name, o := range map[string]options{"local": {}, "redis": {redis: redistest.Start(t).Addr}} {
		t.Run(name, func(t *testing.T) {
			urls := []string{serve(t, o)}
			if o.redis != "" {
				urls = append(urls, serve(t, o))
			}
			client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
			var got []string
			for i := range 5 {
				response, err := client.Get(urls[i%len(urls)] + "/hello")
				require.NoError(t, err)
				_ = response.Body.Close()
				got = append(got, fmt.Sprint(response.StatusCode, response.Header.Get("Retry-After") != ""))
			}
			require.Equal(t, []string{"200 false", "200 false", "200 false", "429 true", "429 true"}, got)
			response, err := client.Get(urls[0] + "/other")
			require.NoError(t, err)
			_ = response.Body.Close()
			require.Equal(t, http.StatusOK, response.StatusCode)
		})
	}
}

// What the program says to try works.
func TestCurl(t *testing.T) {
	curl := redistest.Program(t, "curl")
	url := serve(t, options{})
	var codes []string
	for range 4 {
		out, err := exec.Command(curl, "-s", "-i", url+"/hello").Output()
		require.NoError(t, err)
		first, _, _ := strings.Cut(string(out), "\r\n")
		codes = append(codes, first)
	}
	require.Equal(t, []string{"HTTP/1.1 200 OK", "HTTP/1.1 200 OK", "HTTP/1.1 200 OK", "HTTP/1.1 429 Too Many Requests"}, codes)
}

func TestBadFlags(t *testing.T) {
	o := options{listen: "127.0.0.1:0", limit: 0, window: time.Second, paths: 1}
	require.ErrorIs(t, run(t.Context(), o, new(output)), slidingwindow.ErrInvalidConfig)
}

// However many paths are called, no more limiters are kept than that; none that still counts is forgotten.
func TestLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opened := 0
		l, err := newLimits(3, time.Minute, func(path string) (*slidingwindow.Limiter, error) {
			opened++
			return slidingwindow.New(path, 1, time.Minute, time.Minute)
		})
		require.NoError(t, err)
		a := l.of("/a")
		for i := range 100 {
			l.of(fmt.Sprint("/", i))
		}
		require.Len(t, l.byPath, 3)
		require.Equal(t, 4, opened)
		require.Same(t, l.rest, l.of("/z"))
		require.Same(t, a, l.of("/a"))
		require.Same(t, l.rest, l.of("/"+strings.Repeat("x", 1000)))
		time.Sleep(time.Minute + time.Second)
		require.Same(t, a, l.of("/a"), "it was idle, but nobody needs its place")
		require.NotSame(t, l.rest, l.of("/z"))
		require.Len(t, l.byPath, 3)
		require.Same(t, a, l.of("/a"))
	})
}

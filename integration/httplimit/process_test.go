// Package httplimit tests the middleware with clients that are not ours: curl and wrk.
package httplimit

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

func TestMain(m *testing.M) { redistest.Main(m) }

// bursty is a limiter of the memory store.
func bursty(t *testing.T, rate float64, opts ...tb.Option) *tb.RateLimiter {
	t.Helper()
	l, err := tb.NewSmoothBursty("bucket", rate, opts...)
	require.NoError(t, err)
	return l
}

func limited(t *testing.T, gate gate.Gate, next http.Handler, opts ...httplimit.MiddlewareOption) http.Handler {
	t.Helper()
	limit, err := httplimit.NewMiddleware(gate, opts...)
	require.NoError(t, err)
	return limit(next)
}

var ok = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })

// What a client that is not ours sees.
func TestCurl(t *testing.T) {
	curl := redistest.Program(t, "curl")
	server := httptest.NewServer(limited(t, gate.One(bursty(t, 0.1, tb.WithMaxPermits(2), tb.WithInitialPermits(2)), 0), ok))
	defer server.Close()
	for _, want := range []string{ // and the seconds that pass between the calls
		`^HTTP/1\.1 200 OK\r\n.*RateLimit: "default";r=1;t=10\r\nRateLimit-Policy: "default";q=2;w=20\r\n.*\r\n\r\nok$`,
		`^HTTP/1\.1 200 OK\r\n.*RateLimit: "default";r=0;t=(20|1.)\r\nRateLimit-Policy: "default";q=2;w=20\r\n.*\r\n\r\nok$`,
		`^HTTP/1\.1 429 Too Many Requests\r\n.*RateLimit: "default";r=0;t=(10|.)\r\n.*Retry-After: (10|.)\r\n`,
	} {
		out, err := exec.Command(curl, "--silent", "--show-error", "--include", "--max-time", "60", "--noproxy", "*", server.URL).CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Regexp(t, "(?is)"+want, string(out))
	}
}

// wrk calls as fast as it can, for ten seconds in CI and one elsewhere: what passes is what the bucket allows, the rest is
// refused, each gets an answer, and nothing is left running.
func TestUnderLoad(t *testing.T) {
	wrk := redistest.Program(t, "wrk")
	const rate, size = 200, 100
	for name, wait := range map[string]time.Duration{"refusing": 0, "waiting": 100 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			leftBefore := goleak.IgnoreCurrent()
			seconds := 1
			if os.Getenv("CI") == "true" {
				seconds = 10
			}
			var passed, refused atomic.Int64
			l := bursty(t, rate, tb.WithMaxPermits(size), tb.WithInitialPermits(size))
			count := func(n *atomic.Int64, status int) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { n.Add(1); w.WriteHeader(status) })
			}
			server := httptest.NewServer(limited(t, gate.One(l, wait), count(&passed, http.StatusOK),
				httplimit.WithRefusalHandler(count(&refused, http.StatusTooManyRequests))))
			defer server.Close()

			began := time.Now()
			out, err := exec.Command(wrk, "--threads", "2", "--connections", "32", "--timeout", "30s", "--duration", strconv.Itoa(seconds)+"s", server.URL).CombinedOutput()
			took := time.Since(began)
			require.NoError(t, err, "%s", out)
			server.Close()
			t.Logf("%s%d passed, %d refused in %v", out, passed.Load(), refused.Load(), took)

			number := func(pattern string) int64 {
				m := regexp.MustCompile(pattern).FindSubmatch(out)
				if m == nil {
					return 0
				}
				n, err := strconv.ParseInt(string(m[1]), 10, 64)
				require.NoError(t, err)
				return n
			}
			total, bad := number(`(\d+) requests in`), number(`Non-2xx or 3xx responses: (\d+)`)
			require.NotContains(t, string(out), "Socket errors")
			require.LessOrEqual(t, float64(passed.Load()), size+rate*(took+wait).Seconds()+1)
			require.GreaterOrEqual(t, float64(passed.Load()), 0.5*rate*float64(seconds))
			require.Positive(t, refused.Load())
			// Of each connection one answer may be under way when wrk ends.
			require.InDelta(t, passed.Load()+refused.Load(), total, 32)
			require.InDelta(t, refused.Load(), bad, 32)
			require.NoError(t, redistest.Poll(20*time.Second, func() error { return goleak.Find(leftBefore) }))
		})
	}
}

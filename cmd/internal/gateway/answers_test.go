package gateway

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A client that sends all of its body before it reads gets the refusal, not a reset connection.
func TestRefusalsOfLargeBodies(t *testing.T) {
	for _, args := range [][]string{nil, {"--inbound"}} {
		p, _ := listening(t, registry.Limit{Rate: 0}, func(http.ResponseWriter, *http.Request) {}, args...)
		for name, header := range map[string]string{"a length": "Content-Length: 4000000\r\n\r\n", "a chunk": "Transfer-Encoding: chunked\r\n\r\n3d0900\r\n"} {
			for _, target := range []string{"/fares", "/%2f"} {
				t.Run(fmt.Sprint(args, name, target), func(t *testing.T) {
					t.Parallel()
					c := p.dial(t)
					_, err := io.WriteString(c, "POST "+target+" HTTP/1.1\r\nHost: h\r\n"+header)
					require.NoError(t, err)
					for range 40 { // slower than net/http lingers
						_, err = c.Write(make([]byte, 100_000))
						require.NoError(t, err)
						time.Sleep(15 * time.Millisecond)
					}
					if name == "a chunk" {
						_, err = io.WriteString(c, "\r\n0\r\n\r\n")
						require.NoError(t, err)
					}
					response, err := http.ReadResponse(bufio.NewReader(c), nil)
					require.NoError(t, err)
					text, err := io.ReadAll(response.Body)
					require.NoError(t, err)
					require.GreaterOrEqual(t, response.StatusCode, 400)
					require.NotEmpty(t, text)
				})
			}
		}
		c := p.dial(t)
		_, err := io.WriteString(c, "POST /fares HTTP/1.1\r\nHost: h\r\nExpect: 100-continue\r\nContent-Length: 4000000\r\n\r\n")
		require.NoError(t, err)
		response, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(t, err)
		require.Equal(t, http.StatusServiceUnavailable, response.StatusCode, "not asked for the body")
	}
}

// A client that sends its body slowly gets the whole refusal before the rest of the body is discarded. Of a body without a length net/http reads
// 256 KiB first.
func TestRefusalsOfSlowBodies(t *testing.T) {
	p, _ := listening(t, registry.Limit{Rate: 0}, func(http.ResponseWriter, *http.Request) {})
	for _, target := range []string{"/fares", "/%2f"} {
		for name, begins := range map[string]string{"a length": "Content-Length: 4000000\r\n\r\n", "a chunk": "Transfer-Encoding: chunked\r\n\r\n3d0900\r\n" + strings.Repeat("x", netHTTPDiscards+1)} {
			t.Run(name+target, func(t *testing.T) {
				t.Parallel()
				c := p.dial(t)
				require.NoError(t, c.SetDeadline(time.Now().Add(longestUnread*9/10)))
				_, err := io.WriteString(c, "POST "+target+" HTTP/1.1\r\nHost: h\r\n"+begins)
				require.NoError(t, err)
				response, err := http.ReadResponse(bufio.NewReader(c), nil)
				require.NoError(t, err)
				text, err := io.ReadAll(response.Body)
				require.NoError(t, err)
				require.GreaterOrEqual(t, response.StatusCode, 400)
				require.NotEmpty(t, text)
			})
		}
	}
}

// When the drain period is over, each call that waits is told that the server goes down.
func TestDrainAnswersCallsThatWait(t *testing.T) {
	for _, args := range [][]string{nil, {"--inbound"}} {
		const calls = 50
		p, s := draining(t, append(args, "--drain", "100ms")...)
		responses := make(chan string, calls)
		for range calls {
			c := p.dial(t)
			go func() {
				_, _ = io.WriteString(c, anyRequest)
				response, err := http.ReadResponse(bufio.NewReader(c), nil)
				if err != nil {
					responses <- err.Error()
					return
				}
				text, _ := io.ReadAll(response.Body)
				responses <- fmt.Sprint(response.StatusCode, " ", response.Header.Get("Retry-After"), " ", string(text))
			}()
		}
		require.Eventually(t, func() bool { return p.calls.inFlight.Load() == calls }, 30*time.Second, time.Millisecond)
		require.ErrorIs(t, s.drain(), ErrCutOff)
		for range calls {
			require.Equal(t, "503 1 the server is going down\n", <-responses)
		}
	}
}

// The fields of the middleware are those of the response, also after a 103 of the upstream.
func TestEarlyHintsAndRateLimits(t *testing.T) {
	p, _ := listening(t, registry.Limit{Rate: 1e6}, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Link", "</a.css>")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Set("Ratelimit", `"upstream";r=1;t=1`)
		_, _ = io.WriteString(w, "ok")
	}, "--inbound")
	c := p.dial(t)
	_, err := io.WriteString(c, anyRequest)
	require.NoError(t, err)
	responses := bufio.NewReader(c)
	for range 2 {
		response, err := http.ReadResponse(responses, nil)
		require.NoError(t, err)
		require.Equal(t, http.StatusEarlyHints, response.StatusCode)
		require.Empty(t, response.Header["Ratelimit-Policy"])
	}
	response, err := http.ReadResponse(responses, nil)
	require.NoError(t, err)
	require.Len(t, response.Header["Ratelimit-Policy"], 1)
	require.Len(t, response.Header["Ratelimit"], 2)
	require.Contains(t, response.Header["Ratelimit"][0], `"default"`)
}

// deadlines is a connection that notes its read deadline.
type deadlines struct {
	net.Conn
	read time.Time
}

func (d *deadlines) SetReadDeadline(t time.Time) error { d.read = t; return nil }
func (d *deadlines) CloseWrite() error                 { return nil }

// A client whose upstream has ended its direction is waited for no longer than a minute, and no longer than --upgrade-timeout.
func TestHalfClosedUpgradesEnd(t *testing.T) {
	for silence, want := range map[time.Duration]time.Duration{0: time.Minute, 10 * time.Minute: time.Minute, time.Second: time.Second} {
		d := &deadlines{}
		u := &upgraded{Conn: d, silence: silence}
		require.NoError(t, u.CloseWrite())
		require.WithinDuration(t, time.Now().Add(want), d.read, 30*time.Second)
		require.LessOrEqual(t, time.Until(d.read), want)
	}
}

// draining is a gateway with a row whose calls wait.
func draining(t *testing.T, args ...string) (*proxy, *service) {
	t.Helper()
	limits, err := registry.New(registry.Static{{Name: "/*", Rate: 0.0001, MaxWait: 1e6 * time.Second}}, tokenbucket.NewMemoryStore())
	require.NoError(t, err)
	t.Cleanup(limits.Close)
	first, err := limits.Enter(t.Context(), "/events")
	require.NoError(t, err)
	require.True(t, first.OK)
	p := openProxy(t, limits, append([]string{"--admin", "", "--upstream", "http://127.0.0.1:1", "--drain-delay", "0"}, args...)...)
	s := &service{config: p.config, log: p.log, proxy: p, admin: &admin{config: p.config, proxy: p}}
	t.Cleanup(s.close)
	p.config.listen = redistest.FreeAddr()
	require.NoError(t, s.listen())
	return p, s
}

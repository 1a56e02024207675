package input

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// hostile are names that would like to be something else: another key, a pattern, a command, a state, another name's lock.
var hostile = []string{
	"x", "x:lock", "x}", "x}:lock", "{x}", "{x}:lock", "%7Bx%7D", "x%7D:lock", "x:probe", "x:state", "x}:held", "instances",
	"{", "}", "{}", "{a}{b}", "a}{b", "*", "?", "[a-z]", "x*", "\x00", "x\x00", "\r\nDEL x\r\n", "$1\r\nx\r\n", "x\n", " ", "x ", "\t", "\x1b[2J",
	"/ibe/AvailFare", "../../x", "é", "e\u0301", "\u202ex", "tb1 epoch=1", "'; DROP TABLE x; --", strings.Repeat("x", 512), strings.Repeat("{", 512),
	strings.Repeat("\u00e9", 256),
}

// impossible are names that no bucket can have.
var impossible = []string{"", strings.Repeat("x", 513), strings.Repeat("x", 64<<10), "\xff", "x\xc3", "\xed\xa0\x80", strings.Repeat("\x00", 64<<10)}

// I3: each name has a bucket, a semaphore and a window of its own, with keys of its own, although all share one prefix: a change of one
// shows in no other. Invalid names are refused without a request to Redis.
func TestI3Names(t *testing.T) {
	for which, store := range faultlab.Stores {
		t.Run(which, func(t *testing.T) {
			server := redistest.Start(t)
			client, count := counted(t, server)
			admin := server.Client(t, patient)
			require.NoError(t, admin.Set(ctx, "x", "somebody else's", 0).Err())
			const prefix = "all:"
			buckets := store(client, tokenbucket.WithKeyPrefix(prefix))
			var limiters []*tokenbucket.RateLimiter
			for i, name := range hostile {
				l, err := tokenbucket.NewSmoothBursty(name, float64(1000+i), tokenbucket.WithStore(buckets), tokenbucket.WithStoreTimeout(limit))
				require.NoError(t, err, "%q", name)
				limiters = append(limiters, l)
				for range i + 1 {
					_, err := l.Reserve(ctx, 1)
					require.NoError(t, err, "%q", name)
				}
			}
			for i, l := range limiters {
				b, err := l.State(ctx)
				require.NoError(t, err)
				require.Equal(t, float64(1000+i), b.Rate, "%q", l.Name())
				require.EqualValues(t, i+2, b.Seq, "%q: begun, and what was taken of it", l.Name())
			}
			own := func() map[string]string { // without locks that are just being released
				all := content(admin)
				for key := range all {
					if strings.HasSuffix(key, "}:lock") {
						delete(all, key)
					}
				}
				return all
			}
			before := own()
			require.Len(t, before, len(hostile)+1)
			for key := range before {
				if key != "x" {
					require.Regexp(t, `^all:\{[^{}\x00- ]+\}$`, key)
				}
			}

			// Whatever is requested of one of them, the others stay as they are.
			for i, l := range limiters {
				require.NoError(t, l.SetRate(ctx, 7))
				require.NoError(t, l.Penalize(ctx, time.Millisecond))
				require.NoError(t, l.Reset(ctx))
				after := own()
				changed := 0
				for key, value := range after {
					if before[key] != value {
						changed++
					}
				}
				require.Equal(t, 1, changed, "%q", hostile[i])
				require.Len(t, after, len(before))
				before = after
			}

			// Semaphores and windows of the same names under the same prefix.
			keys := len(before)
			for _, name := range hostile {
				s, err := semaphore.NewRedis(client, name, 1, semaphore.WithKeyPrefix(prefix), semaphore.WithStoreTimeout(limit))
				require.NoError(t, err)
				p, err := s.TryAcquire(ctx, 1, 0)
				require.NoError(t, err)
				require.NotNil(t, p, "%q", name)
				none, err := s.TryAcquire(ctx, 1, 0)
				require.ErrorIs(t, err, semaphore.ErrRefused)
				require.Nil(t, none, "%q", name)
				for _, id := range append(hostile[1:], p.ID()+" ", p.ID()+"\n", strings.ToUpper(p.ID())+"x") { // of places without a holder
					if len(id) <= 40 {
						require.ErrorIs(t, semaphore.NewGroup(s).Done(ctx, id), semaphore.ErrNotHeld, "%q", id)
					}
				}
				held, err := s.Holders(ctx)
				require.NoError(t, err)
				require.Len(t, held, 1)
				w, err := slidingwindow.New(name, 1, time.Hour, time.Minute, slidingwindow.WithRedis(client), slidingwindow.WithKeyPrefix(prefix),
					slidingwindow.WithStoreTimeout(limit))
				require.NoError(t, err)
				for _, want := range []bool{true, false} {
					ok, err := w.Allow(ctx)
					require.NoError(t, err)
					require.Equal(t, want, ok, "%q", name)
				}
				after := own()
				for key, value := range before {
					require.Equal(t, value, after[key], "%q changed %q", name, key)
				}
				require.Len(t, after, keys+2, "state and a window: %q", name)
				require.NoError(t, s.Close(ctx))
				before = own()
				keys = len(before)
			}
			require.Equal(t, "somebody else's", admin.Get(ctx, "x").Val())

			sent := count.sent.Load()
			for _, name := range impossible {
				_, err := tokenbucket.NewSmoothBursty(name, 5, tokenbucket.WithStore(buckets))
				require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
				readable(t, err)
				_, err = tokenbucket.NewSmoothWarmingUp(name, 5, time.Second, tokenbucket.WithStore(buckets))
				require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
				_, err = semaphore.NewRedis(client, name, 1)
				require.ErrorIs(t, err, semaphore.ErrInvalidConfig)
				readable(t, err)
				if len(name) == 0 || len(name) > 512 { // a window's may be any bytes
					_, err = slidingwindow.New(name, 1, time.Second, time.Second, slidingwindow.WithRedis(client))
					require.ErrorIs(t, err, slidingwindow.ErrInvalidConfig)
					readable(t, err)
				}
			}
			require.Equal(t, sent, count.sent.Load(), "Redis was not asked")
			faultlab.CleanUp(t, admin, prefix)
		})
	}
}

// readable requires an error that may be printed.
func readable(t *testing.T, err error) {
	t.Helper()
	require.Less(t, len(err.Error()), 600)
	require.NotRegexp(t, `[\x00-\x1f\x7f]`, err.Error())
}

// I3: names that come from requests. Each path has a bucket; paths that cannot be names share one or are cut. A client that makes up paths
// changes no other client's bucket, and costs no more keys than paths.
func TestI3Requests(t *testing.T) {
	server := redistest.Start(t)
	client, _ := counted(t, server)
	admin := server.Client(t, patient)
	limits, err := registry.New(registry.Static{{Name: "/victim", Rate: 1000, MaxWait: 500 * time.Millisecond}},
		tokenbucket.NewRedisScriptStore(client), registry.WithUnknown(registry.Default(registry.Limit{Rate: 0.001})),
		registry.WithLimiterOptions(tokenbucket.WithStoreTimeout(limit)))
	require.NoError(t, err)
	defer limits.Close()
	limited, err := httplimit.NewMiddleware(limits)
	require.NoError(t, err)
	gateway := httptest.NewServer(limited(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
	defer gateway.Close()
	conn, err := net.Dial("tcp", gateway.Listener.Addr().String())
	require.NoError(t, err)
	defer func() { _ = conn.Close() }()
	in := bufio.NewReader(conn)
	get := func(target string) int { // as it is: a client of net/http would clean it
		_, err := fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: gateway\r\n\r\n", target)
		require.NoError(t, err)
		response, err := http.ReadResponse(in, nil)
		require.NoError(t, err)
		_ = response.Body.Close()
		return response.StatusCode
	}
	require.Equal(t, 200, get("/victim"))
	victim := admin.Get(ctx, "tokenbucket:{/victim}").Val()
	require.NotEmpty(t, victim)
	long := "/" + strings.Repeat("x", 64<<10)
	names := map[string]bool{}
	for _, c := range []struct{ target, bucket string }{
		{"/%7D:lock", "/}:lock"}, {"/victim%7D", "/victim}"}, {"/victim%7D:lock", "/victim}:lock"}, {"/%7Bx%7D", "/{x}"}, {"/victim%00", "/victim\x00"},
		{"/victim%0D%0ADEL%20x", "/victim\r\nDEL x"}, {"/*", "/*"}, {"/%3F", "/?"}, {"/%FF", "/?"}, {"/victim%20", "/victim "}, {"//victim", "//victim"},
		{"/./victim", "/./victim"}, {"/VICTIM", "/VICTIM"}, {"/victim/", "/victim/"}, {long, long[:512]}, {long + "y", long[:512]}, {"/victim?", "/victim"},
		{"http://other/victim", "/victim"},
	} {
		status := 200
		if names[c.bucket] {
			status = 429
		}
		require.Equal(t, status, get(c.target), "%.80q", c.target)
		if c.bucket != "/victim" {
			names[c.bucket] = true
			require.Equal(t, 429, get(c.target), "%.80q: one in a thousand seconds", c.target)
		}
	}
	require.Len(t, content(admin), len(names)+1)
	b, err := tokenbucket.NewSmoothBursty("/victim", 1000, tokenbucket.WithStore(tokenbucket.NewRedisScriptStore(admin)))
	require.NoError(t, err)
	state, err := b.State(ctx)
	require.NoError(t, err)
	require.EqualValues(t, 4, state.Seq, "begun, and its own three requests")
	require.Equal(t, 1000.0, state.Rate)
}

package httplimit_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/tokenbuckettest"
)

// Requests leave when their permits are due, and what cannot be due in time is refused at once.
func TestTransportWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		sent := make(chan time.Duration, 10)
		tr := transport(t, gate.One(bursty(t, 10, tb.WithMaxPermits(1)), 300*time.Millisecond),
			httplimit.WithBase(base(func(r *http.Request) (*http.Response, error) {
				sent <- time.Since(start)
				return fine(r)
			})))
		refusedAt := make(chan error, 10)
		for range 6 {
			go func() {
				r, b := post(t)
				response, err := tr.RoundTrip(r)
				if err == nil {
					response.Body.Close()
					return
				}
				if b.closed.Load() != 1 || time.Since(start) != 0 {
					err = errors.New("late, or its body is still open")
				}
				refusedAt <- err
			}()
			synctest.Wait()
		}
		for i := range 4 { // one is stored, and three are due within 300 ms
			require.Equal(t, time.Duration(i)*100*time.Millisecond, <-sent)
		}
		for range 2 {
			var refused *httplimit.RefusedError
			require.ErrorAs(t, <-refusedAt, &refused)
			require.Equal(t, "/fares", refused.Key)
			require.Equal(t, 100*time.Millisecond, refused.RetryAfter) // due in 400 ms, and 300 may be waited
		}
		require.Empty(t, sent)
	})
}

// http.Client wraps what Transport returns; errors.Is and errors.As see through it.
func TestRefusalThroughClient(t *testing.T) {
	l := single(t)
	client := &http.Client{Transport: transport(t, gate.One(l, 0), httplimit.WithBase(fine))}
	response, err := client.Get("http://upstream.test/fares?from=FRA")
	require.NoError(t, err)
	response.Body.Close()

	_, err = client.Get("http://upstream.test/fares?from=FRA")
	var wrapped *url.Error
	require.ErrorAs(t, err, &wrapped)
	require.ErrorIs(t, err, httplimit.ErrRefused)
	var refused *httplimit.RefusedError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, "/fares", refused.Key)
	require.InDelta(t, 1000, refused.RetryAfter.Seconds(), 60)
	require.ErrorContains(t, err, `httplimit: refused: key "/fares": bucket "bucket": try again in 16m`)
}

// A response in place of the error is one that net/http itself would write and read.
func TestRefusalResponse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := bursty(t, 0.4)
		tr := transport(t, gate.One(l, 0), httplimit.WithBase(fine), httplimit.WithRefusalResponse())
		require.True(t, take(t, l))
		for _, method := range []string{http.MethodPost, http.MethodHead} {
			r, b := post(t)
			r.Method = method
			response, err := tr.RoundTrip(r)
			require.NoError(t, err)
			require.Same(t, r, response.Request)
			require.EqualValues(t, 1, b.closed.Load())
			require.Equal(t, "429 Too Many Requests", response.Status)
			require.Equal(t, "3", response.Header.Get("Retry-After"), "2.5 s, rounded up")

			var wire bytes.Buffer
			require.NoError(t, response.Write(&wire))
			read, err := http.ReadResponse(bufio.NewReader(&wire), r)
			require.NoError(t, err)
			require.Equal(t, response.Header, read.Header)
			require.Equal(t, response.ContentLength, read.ContentLength)
			require.Equal(t, response.Proto, read.Proto)
			text, err := io.ReadAll(read.Body)
			require.NoError(t, err)
			if method == http.MethodHead {
				require.Empty(t, text)
				require.Equal(t, http.NoBody, response.Body)
			} else {
				require.Len(t, text, int(read.ContentLength))
				require.Contains(t, string(text), "rate limit")
			}
		}
	})
}

// A wait given up leaves no trace: who comes next waits as if it had never been.
func TestCancelledWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := bursty(t, 1, tb.WithMaxPermits(1))
		sent := 0
		tr := transport(t, gate.One(l, time.Minute), httplimit.WithBase(base(func(r *http.Request) (*http.Response, error) {
			sent++
			return fine(r)
		})))
		first, _ := post(t)
		response, err := tr.RoundTrip(first)
		require.NoError(t, err)
		response.Body.Close()

		reason := errors.New("the user closed the tab")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(100*time.Millisecond, func() { cancel(reason) })
		r, b := post(t)
		start := time.Now()
		_, err = tr.RoundTrip(r.WithContext(ctx))
		require.ErrorIs(t, err, reason)
		require.Equal(t, 100*time.Millisecond, time.Since(start))
		require.EqualValues(t, 1, b.closed.Load())
		require.Equal(t, 1, sent)

		next, err := l.Reserve(t.Context(), 1)
		require.NoError(t, err)
		require.Equal(t, 900*time.Millisecond, next.Delay())
	})
}

// A permit that would be due after the request's deadline is a refusal, at once: nothing is waited for in vain.
func TestDeadlineIsARefusal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := bursty(t, 1, tb.WithMaxPermits(1))
		require.True(t, take(t, l))
		tr := transport(t, gate.One(l, time.Minute), httplimit.WithBase(fine),
			httplimit.WithOnError(func(*http.Request, error) error { return nil })) // which must not let it pass
		ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		start := time.Now()
		r, b := post(t)
		_, err := tr.RoundTrip(r.WithContext(ctx))
		var refused *httplimit.RefusedError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, 700*time.Millisecond, refused.RetryAfter)
		require.Zero(t, time.Since(start))
		require.EqualValues(t, 1, b.closed.Load())
	})
}

// A context that has ended sends nothing and asks nobody whether to pass.
func TestEndedContext(t *testing.T) {
	reason := errors.New("the user closed the tab")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(reason)
	for name, of := range map[string]func(*tb.RateLimiter) gate.Gate{
		"refused by the limiter": func(l *tb.RateLimiter) gate.Gate { return gate.One(l, 0) },
		"granted all the same": func(l *tb.RateLimiter) gate.Gate {
			return &spy{enter: func(ctx context.Context, key string) (*gate.Admission, error) {
				return gate.One(l, 0).Enter(context.WithoutCancel(ctx), key)
			}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			l := single(t)
			sent := httplimit.WithBase(base(func(*http.Request) (*http.Response, error) { panic("sent") }))
			tr := transport(t, of(l), sent, httplimit.WithOnError(func(*http.Request, error) error { return nil }))
			r, b := post(t)
			_, err := tr.RoundTrip(r.WithContext(ctx))
			require.ErrorIs(t, err, reason)
			require.EqualValues(t, 1, b.closed.Load())
			require.Equal(t, name == "refused by the limiter", take(t, l), "a permit that was due is used")
		})
	}
}

// The permit of a request that fails is used, however far the request has come: it was due.
func TestPermitOfARequestThatFails(t *testing.T) {
	refusing, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	closed := refusing.Addr().String()
	require.NoError(t, refusing.Close())
	hangUp := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }))
	defer hangUp.Close()

	for name, c := range map[string]struct {
		url  string
		base http.RoundTripper
	}{
		"nobody listens": {"http://" + closed, &http.Transport{}},
		"given up during the dial": {"http://upstream.test", &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}}},
		"hang-up":         {hangUp.URL, &http.Transport{}},
		"base that fails": {"http://upstream.test", base(func(*http.Request) (*http.Response, error) { return nil, errAway })},
	} {
		t.Run(name, func(t *testing.T) {
			l := single(t)
			tr := transport(t, gate.One(l, 0), httplimit.WithBase(c.base))
			defer tr.CloseIdleConnections()
			limit := time.Minute
			if name == "given up during the dial" {
				limit = 50 * time.Millisecond
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, strings.NewReader("question"))
			require.NoError(t, err)
			_, err = tr.RoundTrip(r)
			require.Error(t, err)
			require.NotErrorIs(t, err, httplimit.ErrRefused)
			require.False(t, take(t, l), "%v", err)
		})
	}
}

// What http.Transport sends again by itself, because the idle connection was dead, has one permit more if it was written to that connection.
func TestDeadIdleConnection(t *testing.T) {
	var served, dials atomic.Int32
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served.Add(1) }))
	var mu sync.Mutex
	var conns []net.Conn
	server.Config.ConnState = func(c net.Conn, s http.ConnState) {
		if s == http.StateIdle {
			mu.Lock()
			conns = append(conns, c)
			mu.Unlock()
		}
	}
	server.Start()
	defer server.Close()
	l := bursty(t, 0.001, tb.WithMaxPermits(3), tb.WithInitialPermits(3))
	tr := transport(t, gate.One(l, 0), httplimit.WithBase(&http.Transport{
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			dials.Add(1)
			return new(net.Dialer).DialContext(ctx, network, addr)
		},
	}))
	defer tr.CloseIdleConnections()
	// Requests race with the client's notice that the connection is gone; either way there is a second dial.
	kill := func() {
		require.Eventually(t, func() bool { mu.Lock(); defer mu.Unlock(); return len(conns) > 0 }, 10*time.Second, time.Millisecond)
		mu.Lock()
		defer mu.Unlock()
		for _, c := range conns {
			_ = c.Close()
		}
		conns = nil
	}
	for want := range int32(2) {
		if want > 0 {
			kill()
		}
		response, err := tr.RoundTrip(get(t, server.URL))
		require.NoError(t, err)
		_, _ = io.Copy(io.Discard, response.Body)
		response.Body.Close()
		require.Equal(t, want+1, served.Load())
		require.Equal(t, want+1, dials.Load())
	}
	state, err := l.State(t.Context())
	require.NoError(t, err)
	require.InDelta(t, 0.5, state.StoredPermits, 0.6, "two requests, two or three permits")
}

// A store that hangs does not hold up a caller that has given up. The permit goes back later, or is lost; the limiter logs that its store is
// away.
func TestHangingStore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := tokenbuckettest.NewStore()
		away, outages := logs()
		l := bursty(t, 1, tb.WithStore(store), tb.WithMaxPermits(1), tb.WithStoreTimeout(5*time.Second), tb.WithLogger(away))
		require.True(t, take(t, l))
		tr := transport(t, gate.One(l, time.Minute), httplimit.WithBase(fine))
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(100*time.Millisecond, func() {
			store.Fail(tokenbuckettest.Hang())
			cancel()
		})
		start := time.Now()
		r, _ := post(t)
		_, err := tr.RoundTrip(r.WithContext(ctx))
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, 120*time.Millisecond, time.Since(start))
		time.Sleep(11 * time.Second) // the store's own timeout
		require.Contains(t, outages.String(), "an outage of the store has begun")
		store.Restore() // until when it is probed
		time.Sleep(10 * time.Second)
	})
}

// 429 and 503 with a Retry-After hold the bucket back, for no longer than allowed, before the caller sees the response.
func TestPenalty(t *testing.T) {
	date := time.Date(2026, time.February, 3, 4, 5, 6, 0, time.UTC)
	for name, c := range map[string]struct {
		status  int
		header  []string
		opts    []httplimit.TransportOption
		penalty time.Duration
	}{
		"seconds":               {429, []string{"Retry-After", "7"}, nil, 7 * time.Second},
		"unavailable":           {503, []string{"Retry-After", "7"}, nil, 7 * time.Second},
		"clipped":               {429, []string{"Retry-After", "61"}, nil, time.Minute},
		"clipped at will":       {429, []string{"Retry-After", "3601"}, []httplimit.TransportOption{httplimit.WithMaxPenalty(time.Hour)}, time.Hour},
		"more than any integer": {429, []string{"Retry-After", "99999999999999999999999999"}, nil, time.Minute},
		"ignored at will":       {429, []string{"Retry-After", "7"}, []httplimit.TransportOption{httplimit.WithMaxPenalty(0)}, 0},
		"date by the upstream's clock": {429, []string{
			"Date", date.Format(http.TimeFormat), "Retry-After", date.Add(9 * time.Second).Format(http.TimeFormat),
		}, nil, 9 * time.Second},
		"date by ours":      {429, []string{"Retry-After", "Sat, 01 Jan 2000 00:00:09 GMT"}, nil, 9 * time.Second}, // where a bubble's time begins
		"date by no clock":  {429, []string{"Date", "today", "Retry-After", "Sat, 01 Jan 2000 00:00:09 GMT"}, nil, 9 * time.Second},
		"old form of dates": {429, []string{"Retry-After", "Saturday, 01-Jan-00 00:00:09 GMT"}, nil, 9 * time.Second},
		"late date clipped": {429, []string{"Retry-After", "Sat, 01 Jan 2000 00:01:01 GMT"}, nil, time.Minute},
		"past":              {429, []string{"Retry-After", "Fri, 31 Dec 1999 23:59:59 GMT"}, nil, 0},
		"zero":              {429, []string{"Retry-After", "0"}, nil, 0},
		"negative":          {429, []string{"Retry-After", "-5"}, nil, 0},
		"signed":            {429, []string{"Retry-After", "+5"}, nil, 0},
		"fraction":          {429, []string{"Retry-After", "1.5"}, nil, 0},
		"nonsense":          {429, []string{"Retry-After", "soon"}, nil, 0},
		"empty":             {429, []string{"Retry-After", ""}, nil, 0},
		"none":              {429, nil, nil, 0},
		"moved":             {301, []string{"Retry-After", "7"}, nil, 0},
		"fine":              {200, []string{"Retry-After", "7"}, nil, 0},
		"gateway":           {502, []string{"Retry-After", "7"}, nil, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := bursty(t, 10, tb.WithInitialPermits(10))
				gate := &spy{Gate: gate.One(l, time.Hour)}
				var upstream *http.Response
				opts := append(c.opts, httplimit.WithBase(base(func(r *http.Request) (*http.Response, error) {
					upstream = respond(r, c.status, c.header...)
					return upstream, nil
				})))
				tr := transport(t, gate, opts...)
				response, err := tr.RoundTrip(get(t, "http://upstream.test/fares"))
				require.NoError(t, err)
				require.Same(t, upstream, response, "unchanged")
				response.Body.Close()
				if c.penalty == 0 {
					require.Empty(t, gate.penalties)
					require.True(t, take(t, l))
					return
				}
				require.Equal(t, []time.Duration{c.penalty}, gate.penalties)
				next, err := l.Reserve(t.Context(), 1)
				require.NoError(t, err)
				require.GreaterOrEqual(t, next.Delay(), c.penalty)
				require.LessOrEqual(t, next.Delay(), c.penalty+200*time.Millisecond)
			})
		})
	}
}

// A penalty that fails, or hangs, is logged; the caller gets its response, at most a second later, even if its context
// ended meanwhile.
func TestPenaltyFails(t *testing.T) {
	for name, c := range map[string]struct {
		penalize func(context.Context, string, time.Duration) error
		takes    time.Duration
	}{
		"fails": {func(context.Context, string, time.Duration) error { return errAway }, 0},
		"hangs": {func(ctx context.Context, _ string, _ time.Duration) error { <-ctx.Done(); return ctx.Err() }, time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				logger, logged := logs()
				ctx, cancel := context.WithCancel(t.Context())
				tr := transport(t, &spy{penalize: c.penalize}, httplimit.WithLogger(logger),
					httplimit.WithBase(base(func(r *http.Request) (*http.Response, error) {
						cancel()
						return respond(r, 429, "Retry-After", "7"), nil
					})))
				start := time.Now()
				response, err := tr.RoundTrip(get(t, "http://upstream.test/fares").WithContext(ctx))
				require.NoError(t, err)
				response.Body.Close()
				require.Equal(t, 429, response.StatusCode)
				require.Equal(t, c.takes, time.Since(start))
				require.Contains(t, logged.String(), "key=/fares retryAfter=7s")
			})
		})
	}
}

// What becomes of a request when the gate fails is the caller's decision.
func TestGateFails(t *testing.T) {
	passing := func(*http.Request, error) error { return nil }
	other := errors.New("not now")
	for name, c := range map[string]struct {
		gate gate.Gate
		opts []httplimit.TransportOption
		want []error // none: passes
	}{
		"by default": {failing(errAway), nil, []error{errAway}},
		"passes":     {failing(errAway), []httplimit.TransportOption{httplimit.WithOnError(passing)}, nil},
		"other error": {failing(errAway), []httplimit.TransportOption{
			httplimit.WithRefusalResponse(),
			httplimit.WithOnError(func(_ *http.Request, err error) error { return errors.Join(other, err) }),
		}, []error{errAway, other}},
		"gate without an answer":     {failing(nil), nil, []error{}},
		"timeout that cannot be met": {gate.One(bursty(t, 5, tb.WithMaxPermits(0)), 0), nil, []error{tb.ErrNeverGranted}},
	} {
		t.Run(name, func(t *testing.T) {
			r, b := post(t)
			response, err := transport(t, c.gate, append(c.opts, httplimit.WithBase(fine))...).RoundTrip(r)
			if c.want == nil {
				require.NoError(t, err)
				response.Body.Close()
				return
			}
			var failed *httplimit.GateError
			require.ErrorAs(t, err, &failed)
			require.Equal(t, "/fares", failed.Key)
			require.NotErrorIs(t, err, httplimit.ErrRefused)
			for _, want := range c.want {
				require.ErrorIs(t, err, want)
			}
			require.EqualValues(t, 1, b.closed.Load())
		})
	}
}

// The caller's request is not changed, the response is not touched, and its Request is the caller's with the admission in its
// context.
func TestTransportLeavesNoTrace(t *testing.T) {
	r, _ := post(t)
	before := *r
	header := r.Header.Clone()
	var upstream *http.Response
	tr := transport(t, &spy{}, httplimit.WithBase(base(func(r *http.Request) (*http.Response, error) {
		upstream = respond(r, 200)
		upstream.Body = &body{Reader: strings.NewReader("answer")}
		return upstream, nil
	})))
	response, err := tr.RoundTrip(r)
	require.NoError(t, err)
	require.Same(t, upstream, response)
	require.IsType(t, &body{}, response.Body, "not wrapped")
	require.NotNil(t, gate.FromContext(response.Request.Context()))
	require.Same(t, r.URL, response.Request.URL)
	require.Equal(t, before, *r)
	require.Equal(t, header, r.Header)
}

// Every hop of a redirect is a request with a permit of its own.
func TestRedirectsTakePermits(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n, _ := strconv.Atoi(r.URL.Path[1:]); n < 3 {
			http.Redirect(w, r, "/"+strconv.Itoa(n+1), http.StatusFound)
		}
	}))
	defer server.Close()
	gate := &spy{}
	client := &http.Client{Transport: transport(t, gate, httplimit.WithBase(server.Client().Transport))}
	response, err := client.Get(server.URL + "/0")
	require.NoError(t, err)
	response.Body.Close()
	require.Equal(t, []string{"/0", "/1", "/2", "/3"}, gate.asked())
	client.CloseIdleConnections()
}

// CloseIdleConnections reaches the base, and needs no base that has it.
func TestCloseIdleConnections(t *testing.T) {
	b := &closing{}
	client := &http.Client{Transport: transport(t, &spy{}, httplimit.WithBase(b))}
	client.CloseIdleConnections()
	require.True(t, b.closed)
	transport(t, &spy{}, httplimit.WithBase(fine)).CloseIdleConnections()
}

type closing struct {
	base
	closed bool
}

func (c *closing) CloseIdleConnections() { c.closed = true }

// Many goroutines, a real server: what arrives is what the bucket allows.
func TestTransportConcurrently(t *testing.T) {
	var served atomic.Int32
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served.Add(1) }))
	defer server.Close()
	l := bursty(t, 0.001, tb.WithMaxPermits(50), tb.WithInitialPermits(50))
	client := &http.Client{Transport: transport(t, gate.One(l, 0), httplimit.WithBase(server.Client().Transport))}
	defer client.CloseIdleConnections()
	var refused, strange atomic.Int32
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			for range 10 {
				response, err := client.Get(server.URL)
				switch {
				case errors.Is(err, httplimit.ErrRefused):
					refused.Add(1)
				case err != nil:
					strange.Add(1)
				default:
					_, _ = io.Copy(io.Discard, response.Body)
					response.Body.Close()
				}
			}
		})
	}
	all.Wait()
	require.EqualValues(t, 50, served.Load())
	require.EqualValues(t, 150, refused.Load())
	require.Zero(t, strange.Load())
}

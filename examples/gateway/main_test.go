package main

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m)
}

const fares = "/ibe/AvailFare"

// result is how calls went: those that passed, those that the gateway refused, those that the airline did, and those that Redis did not
// decide in time, which happens only on a machine that stands still.
type result struct {
	passed, ours, theirs, undecided int
	took, late                      time.Duration // late is by how much this process was woken late, at most
}

// call makes calls from a few callers at once for the given time.
func call(t *testing.T, g *gateway, during time.Duration) (r result) {
	t.Helper()
	began, late := time.Now(), lateness()
	defer func() {
		r.took, r.late = time.Since(began), late()
		if r.undecided > 0 && r.late < 300*time.Millisecond {
			t.Errorf("%d calls were not decided: %+v", r.undecided, r)
		}
	}()
	client := &http.Client{Transport: &http.Transport{}, Timeout: 30 * time.Second}
	defer client.CloseIdleConnections()
	var mu sync.Mutex
	var callers sync.WaitGroup
	until := time.Now().Add(during)
	for range 8 {
		callers.Go(func() {
			for time.Now().Before(until) {
				response, err := client.Post(g.url+fares, "application/json", strings.NewReader("{}"))
				if err != nil {
					t.Error(err)
					return
				}
				body, _ := io.ReadAll(response.Body)
				_ = response.Body.Close()
				mu.Lock()
				switch {
				case response.StatusCode == http.StatusOK:
					r.passed++
				case response.StatusCode == http.StatusServiceUnavailable:
					r.undecided++
				case response.StatusCode != http.StatusTooManyRequests || response.Header.Get("Retry-After") == "":
					t.Errorf("%s: %s", response.Status, body)
				case strings.HasPrefix(string(body), "the airline"):
					r.theirs++
				default:
					r.ours++
				}
				mu.Unlock()
				time.Sleep(10 * time.Millisecond)
			}
		})
	}
	callers.Wait()
	return r
}

// lateness measures how late this process wakes. The returned function ends that, and returns the most.
func lateness() (end func() time.Duration) {
	stop, most := make(chan struct{}), make(chan time.Duration)
	go func() {
		const nap = 5 * time.Millisecond
		var worst time.Duration
		for {
			due := time.Now().Add(nap)
			select {
			case <-stop:
				most <- worst
				return
			case <-time.After(nap):
				worst = max(worst, time.Since(due))
			}
		}
	}()
	return func() time.Duration { close(stop); return <-most }
}

// execute is another run of the program, with --exec.
func execute(t *testing.T, g *gateway, statement string) {
	t.Helper()
	o := g.options
	o.statement = statement
	require.NoError(t, run(t.Context(), o, io.Discard))
}

// follows waits until the gateway has the rate.
func follows(t *testing.T, g *gateway, rate float64) {
	t.Helper()
	require.Eventually(t, func() bool {
		for _, l := range g.limits.Limits() {
			if l.Name == fares {
				return l.Rate == rate
			}
		}
		return false
	}, time.Minute, 10*time.Millisecond)
}

func TestGateway(t *testing.T) {
	for name, at := range map[string]func(testing.TB) options{
		"SQLite":     func(t testing.TB) options { return options{file: filepath.Join(t.TempDir(), "limits.db")} },
		"MariaDB":    func(t testing.TB) options { return options{mysql: dbtest.MariaDB(t).DSN()} },
		"PostgreSQL": func(t testing.TB) options { return options{postgres: dbtest.PostgreSQL(t).DSN()} },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			follow(t, at(t))
		})
	}
}

func follow(t *testing.T, o options) {
	o.listen = "127.0.0.1:0"
	g, err := start(t.Context(), o)
	require.NoError(t, err)
	defer g.close()
	for _, rate := range []int{5, 8} {
		if rate != 5 {
			execute(t, g, "UPDATE t_ratelimite_conf SET rate = 8 WHERE name = '"+fares+"'")
		}
		follows(t, g, float64(rate))
		const seconds = 2
		for round := 1; ; round++ {
			r := call(t, g, seconds*time.Second)
			t.Logf("%d a second: %+v", rate, r)
			require.LessOrEqual(t, float64(r.passed), float64(rate)*(r.took.Seconds()+1)+1)
			if r.late > 100*time.Millisecond { // calls that stood still reach the airline at once, and it may refuse some
				if round < 10 {
					continue
				}
				break
			}
			require.GreaterOrEqual(t, r.passed, rate*seconds/2)
			require.Positive(t, r.ours)
			require.Zero(t, r.theirs, "the airline has nothing to refuse")
			break
		}
	}

	// Off: the airline defends itself, and what it says is passed on.
	execute(t, g, "UPDATE t_ratelimite_switch SET enabled = 0")
	var r result
	require.Eventually(t, func() bool {
		r = call(t, g, 300*time.Millisecond)
		return r.theirs > 0
	}, time.Minute, time.Millisecond)
	execute(t, g, "UPDATE t_ratelimite_switch SET enabled = 1")
	require.Eventually(t, func() bool {
		r = call(t, g, 300*time.Millisecond)
		return r.ours > 0 && r.theirs == 0
	}, time.Minute, time.Millisecond)
	served, refused := g.airline.counts(fares)
	require.Positive(t, served)
	require.Positive(t, refused)
}

// stopping is an output that ends the program when it has been written to.
type stopping struct {
	bytes.Buffer
	stop context.CancelFunc
}

func (s *stopping) Write(p []byte) (int, error) {
	s.stop()
	return s.Buffer.Write(p)
}

// A gateway that was stopped leaves its limits, and the next one keeps them.
func TestRun(t *testing.T) {
	o := options{listen: "127.0.0.1:0", file: filepath.Join(t.TempDir(), "limits.db")}
	for range 2 {
		ctx, stop := context.WithCancel(t.Context())
		out := &stopping{stop: stop}
		require.NoError(t, run(ctx, o, out))
		require.Contains(t, out.String(), "curl -i -X POST http://127.0.0.1:")
		require.Contains(t, out.String(), "sqlite3 "+o.file)
		statement := o
		statement.statement = "DELETE FROM t_ratelimite_conf WHERE name <> '" + fares + "'"
		require.NoError(t, run(t.Context(), statement, io.Discard))
	}
	g, err := start(t.Context(), o)
	require.NoError(t, err)
	defer g.close()
	require.Len(t, g.limits.Limits(), 1)

	taken := o
	taken.listen = strings.TrimPrefix(g.url, "http://")
	_, err = start(t.Context(), taken)
	require.ErrorContains(t, err, "address already in use")
}

// The stub counts as it says: any sliding second.
func TestAirline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := newAirline()
		require.Zero(t, a.take("x", 2))
		time.Sleep(600 * time.Millisecond)
		require.Zero(t, a.take("x", 2))
		require.Equal(t, 400*time.Millisecond, a.take("x", 2))
		time.Sleep(400 * time.Millisecond)
		require.Zero(t, a.take("x", 2))
		require.Equal(t, 600*time.Millisecond, a.take("x", 2))
	})
}

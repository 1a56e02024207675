package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/go-tokenbucket/tokenbucket"
	"github.com/stretchr/testify/require"
)

// total finds the numbers in the table's last line: offered, passed, refused, seen.
var total = regexp.MustCompile(`│ +total │ +(\d+) │ +(\d+) │[^│]*│[^│]*│ +(\d+) │ +(\d+) │`)

func TestDemo(t *testing.T) {
	t.Parallel()
	for name, args := range map[string][]string{
		"script store": {"--store", "script", "--duration", "2s"},
		"lock store":   {"--store", "lock", "--duration", "2s"},
		"memory store": {"--store", "memory", "--duration", "2s"},
		"warm-up":      {"--warmup", "1s"},
		"no burst":     {"--burst", "0", "--rate", "20"},
		"no wait":      {"--max-wait", "0", "--instances", "1"},
		"slow rate":    {"--rate", "0.5"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			status, out, stderr := execute(t.Context(), append([]string{"demo", "--duration", "1s"}, args...)...)
			t.Log(out)
			require.Equal(t, exitOK, status)
			require.Empty(t, stderr)
			require.Contains(t, out, "Verdict: the bound was kept.")
			require.Regexp(t, `(?m)^│ +1 │ +\d+ │ +\d+ │ +([\d.]+ ms|-) │ +([\d.]+ ms|-) │ +\d+ │ +\d+ │`, out)
			require.Equal(t, strings.Contains(name, "store"), regexp.MustCompile(`(?m)^│ +2 │`).MatchString(out), "a line a second")
			require.NotRegexp(t, `(?m)^│ +3 │`, out)
			require.NotContains(t, out, "\x1b", "escape codes without a terminal")
			require.NotContains(t, out, "errors")

			n := totals(t, out)
			require.Equal(t, n.offered, n.passed+n.refused, "every call has one answer")
			require.Equal(t, n.passed, n.seen, "each that passed reached the upstream")
			require.Positive(t, n.seen)
		})
	}
}

type sums struct{ offered, passed, refused, seen int }

func totals(t *testing.T, out string) sums {
	m := total.FindStringSubmatch(out)
	require.NotNil(t, m, "no totals in\n%s", out)
	var n [4]int
	for i := range n {
		var err error
		n[i], err = strconv.Atoi(m[i+1])
		require.NoError(t, err)
	}
	return sums{n[0], n[1], n[2], n[3]}
}

// With one priority for all, few of the bookings pass. If searches have the lowest, nearly all do.
func TestDemoPriority(t *testing.T) {
	t.Parallel()
	status, out, stderr := execute(t.Context(), "demo", "--priority", "--store", "memory", "--duration", "4s")
	t.Log(out)
	require.Equal(t, exitOK, status)
	require.Empty(t, stderr)
	lines := regexp.MustCompile(`(?m)^│ +bookings +│ +(\d+) │ +(\d+) │ +(\d+) │`).FindAllStringSubmatch(out, -1)
	require.Len(t, lines, 2)
	for i, line := range lines {
		offered, err := strconv.Atoi(line[1])
		require.NoError(t, err)
		passed, err := strconv.Atoi(line[2])
		require.NoError(t, err)
		require.Equal(t, i == 1, passed > offered/2, "%s", line[0])
	}
	for _, flag := range []string{"--console", "--burst=2", "--warmup=1s"} {
		status, _, stderr := execute(t.Context(), "demo", "--priority", flag)
		require.Equal(t, exitUsage, status)
		require.Contains(t, stderr, "priority")
	}
}

func TestDemoLeavesARedisAsItWas(t *testing.T) {
	t.Parallel()
	for _, store := range []string{"script", "lock"} {
		t.Run(store, func(t *testing.T) {
			t.Parallel()
			m := miniredis.NewMiniRedis()
			m.ClockTTL(true) // a lock that is lost must end
			require.NoError(t, m.Start())
			defer m.Close()
			require.NoError(t, m.Set("somebody's", "value"))
			status, out, _ := execute(t.Context(), "demo", "--duration", "1s", "--redis", "redis://"+m.Addr()+"/0", "--store", store)
			require.Equal(t, exitOK, status, out)
			require.Equal(t, []string{"somebody's"}, m.Keys())
		})
	}
}

func TestDemoWithoutRedis(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0") // held, so that no other server gets the port
	require.NoError(t, err)
	defer func() { _ = l.Close() }()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
	addr := l.Addr().String()
	status, out, stderr := execute(t.Context(), "demo", "--redis", addr)
	require.Equal(t, exitUsage, status)
	require.Empty(t, out)
	require.Contains(t, stderr, strconv.Quote(addr))
}

func TestInterrupted(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := &interrupter{when: regexp.MustCompile(`seen by upstream [1-9]`), do: cancel}
	require.Equal(t, exitOK, run(ctx, patient, []string{"demo", "--duration", "1m"}, out, io.Discard))
	require.Contains(t, out.String(), "Ended early")
	require.Positive(t, totals(t, out.String()).offered)
	require.Contains(t, out.String(), "Verdict: the bound was kept.")
}

// interrupter does something when a certain line is written.
type interrupter struct {
	bytes.Buffer
	when *regexp.Regexp
	do   func()
}

func (w *interrupter) Write(p []byte) (int, error) {
	if w.when.Match(p) {
		w.do()
	}
	return w.Buffer.Write(p)
}

// What a demo is worth shows when something is wrong.
func TestBrokenLimiter(t *testing.T) {
	t.Parallel()
	type limiter = tokenbucket.RateLimiter
	for _, tt := range []struct {
		name  string
		limit func(options, tokenbucket.Store) (*limiter, error)
		want  []string
	}{
		{"twice as fast", func(o options, s tokenbucket.Store) (*limiter, error) {
			o.rate *= 2
			return patient(o, s)
		}, []string{"nothing is late: BROKEN", "the bound was BROKEN"}},
		{"a bucket too large", func(o options, s tokenbucket.Store) (*limiter, error) {
			o.burst++
			return patient(o, s)
		}, []string{"nothing is late: BROKEN", "the bound was BROKEN"}},
		{"a bucket for each gateway", func(o options, _ tokenbucket.Store) (*limiter, error) {
			return patient(o, tokenbucket.NewMemoryStore())
		}, []string{"but only 0 permits were taken", "the bound was BROKEN"}},
		{"calls that take no permit", func(o options, s tokenbucket.Store) (*limiter, error) {
			return o.limiter(s, tokenbucket.WithSwitch(func() bool { return false }))
		}, []string{"but only 0 permits were taken", "the bound was BROKEN"}},
		{"a store that fails", func(o options, _ tokenbucket.Store) (*limiter, error) {
			return patient(o, failing{})
		}, []string{"│ errors │", "calls failed, the first: tokenbucket: store unusable: bucket \"/ibe/AvailFare\": out of order", "nothing reached the upstream"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			limit := func(o options, s tokenbucket.Store, _ ...tokenbucket.Option) (*limiter, error) { return tt.limit(o, s) }
			status, out, _ := executeWith(t.Context(), limit, "demo", "--rate", "20", "--burst", "1", "--duration", "1s")
			require.Equal(t, exitBroken, status, out)
			require.NotContains(t, out, "What you saw")
			for _, want := range tt.want {
				require.Contains(t, out, want)
			}
		})
	}
}

type failing struct{}

func (failing) Apply(context.Context, *tokenbucket.Batch) error {
	return errors.New("out of order")
}

func TestBar(t *testing.T) {
	var out bytes.Buffer
	calls := &tally{origin: time.Now().Add(-time.Hour)}
	c := calls.begin()
	calls.end(c, failed, errors.New("no"))
	drawBar(&out, 10*time.Second, calls, &upstream{})
	require.Equal(t, "\r████████████████████ 10.0 s   offered 1   passed 0   refused 0   seen by upstream 0   errors 1",
		out.String())
}

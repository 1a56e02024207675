package gateway

import (
	"context"
	"errors"
	"log/slog"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/cmd/internal/condition"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

// logLines records what is logged.
type logLines struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logLines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

// take returns the lines since the last call.
func (l *logLines) take() (all []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	text := strings.TrimSpace(l.text.String())
	if l.text.Reset(); text == "" {
		return nil
	}
	return strings.Split(text, "\n")
}

// A condition is logged when it begins, every minute while it lasts, with the policy, and when it ends.
func TestConditionsAreToldEachMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		o, err := given(t, []string{"--upstream", "http://u:1", "--limits", "sqlite://f", "--redis", "r:1", "--fail", "open"}, nil, "")
		require.NoError(t, err)
		c, err := o.parse()
		require.NoError(t, err)
		var out logLines
		log := slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey {
				return slog.Attr{}
			}
			return a
		}}))
		p, err := newProxy(c, log)
		require.NoError(t, err)
		var unread atomic.Bool
		sw, err := killswitch.New(func(context.Context) (bool, error) {
			if unread.Load() {
				return false, errors.New("connection refused")
			}
			return true, nil
		}, killswitch.WithHook(func(error) {}))
		require.NoError(t, err)
		defer sw.Close()
		a := &admin{config: c, proxy: p, pulse: newPulse(c.probed())}
		a.sw.Store(sw)
		set := func(err error) {
			a.pulse.mu.Lock()
			a.pulse.err, a.pulse.last = err, time.Now()
			a.pulse.mu.Unlock()
		}
		set(nil)
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); a.tell(ctx, log) }()
		defer func() { stop(); <-done }()
		time.Sleep(time.Hour)
		require.Empty(t, out.take())

		const full = `level=WARN msg="redis is full: calls pass without limits (--fail open)" part=redis state=full calls=unlimited policy=open`
		set(errors.Join(tokenbucket.ErrStoreUnavailable, errors.New("OOM command not allowed")))
		time.Sleep(5*time.Minute + 2*time.Second)
		told := out.take()
		require.Len(t, told, 6)
		require.True(t, strings.HasPrefix(told[0], full+" why="), told[0])
		for i, line := range told[1:] {
			require.True(t, strings.HasPrefix(line, full+" for="+(time.Duration(i+1)*time.Minute).String()+" why="), line)
		}
		set(nil)
		time.Sleep(time.Hour)
		require.Equal(t, []string{`level=INFO msg="redis: ok" part=redis state=ok calls=limited policy=open`}, out.take())

		unread.Store(true)
		time.Sleep(3*time.Minute + 2*time.Second)
		require.Len(t, out.take(), 4)
		unread.Store(false)
		time.Sleep(time.Hour)
		require.Equal(t, []string{`level=INFO msg="the switch is on: limits apply" part=switch state=ok calls=limited policy=open`}, out.take())
	})
}

// /readyz is 503 exactly while calls that may pass are not served here.
func TestReadyMeansServed(t *testing.T) {
	full := errors.Join(tokenbucket.ErrStoreUnavailable, errors.New("OOM command not allowed"))
	for name, test := range map[string]struct {
		fail string
		on   bool
		err  error
		want int
		says string
	}{
		"all well":               {"closed", true, nil, 200, "redis: ok"},
		"closed, full":           {"closed", true, full, 503, "redis is full: calls are answered with 503 (--fail closed); for "},
		"closed, full, but off":  {"closed", false, full, 200, "redis is full: no call needs it while the switch is off; for "},
		"open, full":             {"open", true, full, 200, "redis is full: calls pass without limits (--fail open); for "},
		"open, a wrong password": {"open", true, errors.New("WRONGPASS"), 503, "redis refuses this gateway: calls are answered with 503; for "},
		"share, does not reply":  {"share:4", true, unanswered(time.Second), 200, "redis does not reply: calls use this gateway's local share of the limits (--fail share:4); for "},
		"closed, does not reply": {"closed", true, unanswered(time.Second), 503, "redis does not reply: "},
		"closed, password, off":  {"closed", false, errors.New("WRONGPASS"), 200, "redis refuses this gateway: no call needs it while the switch is off"},
	} {
		t.Run(name, func(t *testing.T) {
			o, err := given(t, []string{"--upstream", "http://u:1", "--limits", "sqlite://f", "--redis", "r:1", "--fail", test.fail}, nil, "")
			require.NoError(t, err)
			c, err := o.parse()
			require.NoError(t, err)
			quiet := slog.New(slog.DiscardHandler)
			p, err := newProxy(c, quiet)
			require.NoError(t, err)
			limits, err := registry.New(new(outage), tokenbucket.NewMemoryStore(), registry.WithLogger(quiet))
			require.NoError(t, err)
			defer limits.Close()
			p.metrics.limits.Store(limits)
			sw, err := killswitch.New(func(context.Context) (bool, error) { return test.on, nil })
			require.NoError(t, err)
			defer sw.Close()
			a := &admin{config: c, proxy: p, pulse: newPulse(c.probed())}
			a.sw.Store(sw)
			a.pulse.err, a.pulse.last = test.err, time.Now()
			w := httptest.NewRecorder()
			a.ready(w, nil)
			require.Equal(t, test.want, w.Code, w.Body.String())
			require.Contains(t, w.Body.String(), test.says)
		})
	}
}

// Rows that are off are told as those that are gone, and rows of an earlier time as outdated.
func TestRowsOffAndOutdated(t *testing.T) {
	since := time.Now()
	c := config{options: options{trafficOptions: trafficOptions{unknown: "refuse"}}}
	for _, w := range []struct {
		s     registry.Stats
		state string
		calls condition.Calls
		says  string
	}{
		{registry.Stats{Limits: 3, Disabled: 3}, condition.Off, condition.Unlimited, "every limit is off: its calls pass"},
		{registry.Stats{Limits: 3, Disabled: 2}, condition.OK, condition.Limited, "rows: ok"},
		{registry.Stats{Limits: 3, Disabled: 3, Loss: registry.Loss{Since: since, Before: 3, Gone: 3, Off: 3}}, condition.Lost, condition.Unlimited,
			"3 of 3 limits are gone from the table, or off, and no longer in force"},
		{registry.Stats{Limits: 3, Loss: registry.Loss{Since: since, Before: 3, Gone: 3, Off: 3, Held: true}}, condition.Held, condition.Limited,
			"3 of 3 limits are gone from the table, or off, and still in force"},
		{registry.Stats{Limits: 3, Outdated: []string{"/a"}}, condition.Outdated, condition.Limited, "rows are earlier than others that a table has given, which stay in force: 1"},
	} {
		is := c.ofRows(&w.s)
		require.Equal(t, []any{w.state, w.calls, w.says}, []any{is.State, is.Calls, is.Says})
		if w.state == condition.OK {
			continue
		}
		require.Equal(t, slog.LevelWarn, is.Level())
	}
}

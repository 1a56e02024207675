package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
)

// commandEnv makes this test binary the command, for tests that need processes of their own.
const commandEnv = "RUN_THE_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(commandEnv) != "" {
		main()
	}
	redis.SetLogger(silent{})
	flag.Parse()
	flag.Set("test.parallel", "8") // the demos wait more than they work
	code := m.Run()
	dbtest.StopShared()
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// execute runs the command as a shell would.
func execute(ctx context.Context, args ...string) (status int, stdout, stderr string) {
	return executeWith(ctx, patient, args...)
}

func executeWith(ctx context.Context, limit limiterFunc, args ...string) (status int, stdout, stderr string) {
	var out, errs bytes.Buffer
	status = run(ctx, limit, args, &out, &errs)
	return status, out.String(), errs.String()
}

// patient waits for a store on a machine that is busy with other tests.
func patient(o options, s tokenbucket.Store, opts ...tokenbucket.Option) (*tokenbucket.RateLimiter, error) {
	return o.limiter(s, append(opts, tokenbucket.WithStoreTimeout(time.Minute))...)
}

func TestBadFlags(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want []string // all in the message
	}{
		{[]string{"demo", "--rate", "0"}, []string{"--rate 0"}},
		{[]string{"demo", "--rate", "-3"}, []string{"--rate -3"}},
		{[]string{"demo", "--rate", "NaN"}, []string{"--rate NaN"}},
		{[]string{"demo", "--rate", "Inf"}, []string{"--rate +Inf"}},
		{[]string{"demo", "--rate", "1001"}, []string{"--rate 1001"}},
		{[]string{"demo", "--rate", "fast"}, []string{"--rate", "fast"}},
		{[]string{"demo", "--burst", "-1"}, []string{"--burst -1"}},
		{[]string{"demo", "--burst", "NaN"}, []string{"--burst NaN"}},
		{[]string{"demo", "--burst", "1e300"}, []string{"--burst 1e+300"}},
		{[]string{"demo", "--max-wait", "-0.1"}, []string{"--max-wait -100ms"}},
		{[]string{"demo", "--cache", "-1"}, []string{"--max-wait -1s"}},
		{[]string{"demo", "--max-wait", "NaN"}, []string{"--max-wait", "NaN"}},
		{[]string{"demo", "--instances", "0"}, []string{"--instances 0"}},
		{[]string{"demo", "--instances", "101"}, []string{"--instances 101"}},
		{[]string{"demo", "--instances", "2.5"}, []string{"--instances", "2.5"}},
		{[]string{"demo", "--duration", "1ms"}, []string{"--duration 1ms"}},
		{[]string{"demo", "--duration", "2m"}, []string{"--duration 2m0s"}},
		{[]string{"demo", "--duration", "soon"}, []string{"--duration", "soon"}},
		{[]string{"demo", "--store", "disk"}, []string{`--store "disk"`}},
		{[]string{"demo", "--warmup", "-1s"}, []string{"--warmup -1s"}},
		{[]string{"demo", "--warmup", "1ns"}, []string{"--warmup 1ns", "warm-up period"}},
		{[]string{"demo", "--warmup", "4s", "--burst", "3"}, []string{"--burst 3", "--warmup"}},
		{[]string{"demo", "--redis", "localhost"}, []string{`--redis "localhost"`}},
		{[]string{"demo", "--redis", "localhost:99999"}, []string{`--redis "localhost:99999"`}},
		{[]string{"demo", "--redis", "localhost:6379", "--store", "memory"}, []string{"--redis", "--store memory"}},
		// No call could ever pass: the permit is always due later than the longest wait.
		{[]string{"demo", "--burst", "0", "--max-wait", "0"}, []string{"--burst 0 --max-wait 0s", "200ms"}},
		{[]string{"demo", "--console", "--store", "memory"}, []string{`--store "memory"`, "--console"}},
		{[]string{"demo", "--console", "--warmup", "4s"}, []string{"--warmup 4s", "--console"}},
		{[]string{"demo", "--console", "--console-listen", "nowhere"}, []string{`--console-listen "nowhere"`}},
		{[]string{"console"}, []string{"--redis missing"}},
		{[]string{"console", "--redis", "localhost:6379", "--console-listen", "nowhere"}, []string{`--console-listen "nowhere"`}},
		{[]string{"console", "--redis", "localhost:6379", "--console-users", "/nowhere"}, []string{`--console-users "/nowhere"`, "no such file"}},
		{[]string{"console", "--redis", "localhost:6379", "--console-reader", "10.0.0"}, []string{`--console-reader "10.0.0"`, "CIDR"}},
		{[]string{"console", "--rediss", "x"}, []string{"--rediss"}},
		{[]string{"demo", "extra"}, []string{"extra"}},
		{[]string{"demo", "--fast"}, []string{"--fast"}},
		{[]string{"dmeo"}, []string{"dmeo"}},
		{[]string{"gateway", "--upstream", "http://127.0.0.1:1", "--limits", "sqlite://x"}, []string{"--redis missing"}},
		{[]string{"gateway", "--upstram", "http://127.0.0.1:1"}, []string{"--upstram"}},
		{[]string{"gateway", "extra"}, []string{"1 unexpected arguments"}},
		{[]string{"plot", "--rate", "0"}, []string{"--rate 0"}},
		{[]string{"plot", "--rate", "NaN"}, []string{"--rate NaN"}},
		{[]string{"plot", "--warmup", "0s"}, []string{"--warmup 0s"}},
		{[]string{"plot", "--warmup", "25h"}, []string{"--warmup 25h0m0s"}},
		{[]string{"plot", "--warmup", "1ns"}, []string{"--warmup 1ns", "warm-up period"}},
		{[]string{"plot", "--cold-factor", "1"}, []string{"--cold-factor 1"}},
		{[]string{"plot", "--cold-factor", "Inf"}, []string{"--cold-factor +Inf"}},
		{[]string{"plot", "--format", "gif"}, []string{`--format "gif"`}},
		{[]string{"plot", "--out", ""}, []string{`--out ""`}},
		{[]string{"plot", "--out", "/dev/null/here"}, []string{`--out "/dev/null/here"`}},
	} {
		status, stdout, stderr := execute(t.Context(), tt.args...)
		require.Equal(t, exitUsage, status, "%q", tt.args)
		require.Empty(t, stdout, "%q", tt.args)
		for _, want := range tt.want {
			require.Contains(t, stderr, want, "%q", tt.args)
		}
	}
}

func TestHelp(t *testing.T) {
	for _, args := range [][]string{{}, {"--help"}, {"demo", "--help"}, {"plot", "--help"}, {"gateway", "--help"}, {"console", "--help"}} {
		status, stdout, stderr := execute(t.Context(), args...)
		require.Equal(t, exitOK, status)
		require.Contains(t, stdout, "Usage:")
		require.Empty(t, stderr)
	}
}

// A password must not end up in a log, not even that of a URL which cannot be parsed.
func TestRedacted(t *testing.T) {
	for addr, want := range map[string]string{
		"localhost:6379":                "localhost:6379",
		"redis://localhost:6379/1":      "redis://localhost:6379/1",
		"redis://me:secret@host:1/0":    "redis://xxxxx@host:1/0",
		"redis://me:se@cret@host:port":  "redis://xxxxx@host:port",
		"rediss://:secret@[::1]:6380/2": "rediss://xxxxx@[::1]:6380/2",
	} {
		require.Equal(t, want, redacted(addr))
	}
	status, _, stderr := execute(t.Context(), "demo", "--redis", "redis://:secret@127.0.0.1:no")
	require.Equal(t, exitUsage, status)
	require.NotContains(t, stderr, "secret")
}

// The help names every command, completion too, and a build without a tag is called unreleased.
func TestHelpAndVersion(t *testing.T) {
	status, out, _ := execute(context.Background(), "--help")
	require.Equal(t, exitOK, status)
	for _, name := range []string{"demo", "plot", "gateway", "check", "console", "confirm", "completion", "version"} {
		require.Regexp(t, `(?m)^  `+name+` `, out)
	}
	require.Equal(t, "unreleased", release("(devel)"))
	require.Equal(t, "v1.2.3", release("v1.2.3"))
	status, out, _ = execute(context.Background(), "version")
	require.Equal(t, exitOK, status)
	require.NotContains(t, out, "(devel)")
}

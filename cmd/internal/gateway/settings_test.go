package gateway

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"
)

// given makes options of a command line, an environment and a file.
func given(t *testing.T, args, environ []string, file string) (*options, error) {
	t.Helper()
	o := new(options)
	flags := pflag.NewFlagSet("gateway", pflag.ContinueOnError)
	for _, g := range o.flags() {
		flags.AddFlagSet(g.flags)
	}
	if file != "" {
		path := filepath.Join(t.TempDir(), "gateway.yaml")
		require.NoError(t, os.WriteFile(path, []byte(file), 0o600))
		args = append(args, "--config", path)
	}
	require.NoError(t, flags.Parse(args))
	return o, o.load(flags, environ)
}

// enough is what every gateway needs.
var enough = []string{"--upstream", "http://u:1", "--limits", "sqlite://f", "--redis", "r:1"}

func TestPrecedence(t *testing.T) {
	o, err := given(t,
		[]string{"--interval", "1s"},
		[]string{"TOKENBUCKET_INTERVAL=2s", "TOKENBUCKET_MAX_AGE=2m", "TOKENBUCKET_STORE=", "TOKENBUCKET_SERVICE_HOST=10.0.0.1",
			"TOKENBUCKET_UPSTREAM=http://a:1,/b=http://b:1", "TOKENBUCKET_QUOTA=false", "OTHER=x"},
		"interval: 3s\nmax-age: 3m\nwait: 3s\nquota: true\nstore: lock\nupstream: http://c:1\ncreate-table: true\nunknown: 5\n"+
			"trusted-proxy: [10.0.0.0/8, '::1']\ncolumns: {name: bucket, rate: per_second}\n")
	require.NoError(t, err)
	require.Equal(t, time.Second, o.interval, "the flag wins")
	require.Equal(t, 2*time.Minute, o.maxAge, "the environment wins over the file")
	require.Equal(t, 3*time.Second, o.wait, "the file wins over the default")
	require.False(t, o.quota, "a false is a value")
	require.Equal(t, "lock", o.store, "an empty variable is none")
	require.Equal(t, []string{"http://a:1", "/b=http://b:1"}, o.upstreams)
	require.True(t, o.createTable)
	require.Equal(t, "5", o.unknown, "a number in the file")
	require.Equal(t, []string{"10.0.0.0/8", "::1"}, o.trusted)
	require.Equal(t, []string{"name=bucket", "rate=per_second"}, o.columns)
	require.Equal(t, 30*time.Second, o.drain, "the default")
}

// The file itself may be named by the environment, and every flag has a variable.
func TestFileFromEnvironment(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gateway.yaml")
	require.NoError(t, os.WriteFile(path, []byte("interval: 7s\n"), 0o600))
	o, err := given(t, nil, []string{"TOKENBUCKET_CONFIG=" + path, "TOKENBUCKET_LOG_LEVEL=debug"}, "")
	require.NoError(t, err)
	require.Equal(t, 7*time.Second, o.interval)
	require.Equal(t, "debug", o.logLevel)
}

func TestBadSettings(t *testing.T) {
	for _, tt := range []struct {
		args, environ []string
		file          string
		want          []string
	}{
		{nil, nil, "limitz: x\n", []string{"gateway.yaml", `unknown key "limitz"`, "did you mean limits?"}},
		{nil, nil, "config: other.yaml\n", []string{`unknown key "config"`}},
		{nil, nil, "a: [\n", []string{"--config", "gateway.yaml", "YAML", "line 1"}},
		{nil, nil, "interval:\n", []string{"gateway.yaml: interval without a value"}},
		{nil, nil, "interval: [1s]\n", []string{"gateway.yaml: interval a list: want a duration such as 2s"}},
		{nil, nil, "interval: 5\n", []string{`gateway.yaml: interval "5": want a duration such as 2s`}},
		{nil, nil, "interval: 1ms\n", []string{"gateway.yaml: interval 1ms: want 10ms to 1h0m0s"}},
		{nil, []string{"TOKENBUCKET_DRAIN=soon"}, "", []string{`TOKENBUCKET_DRAIN "soon": want a duration such as 2s`}},
		{nil, []string{"TOKENBUCKET_STORE=disk"}, "", []string{`TOKENBUCKET_STORE "disk": want script, lock, memory`}},
		{[]string{"--config", "/does/not/exist"}, nil, "", []string{`--config "/does/not/exist"`, "no such file"}},
		{[]string{"--upstream-timeout", "-1s"}, nil, "", []string{"--upstream-timeout -1s"}},
		{[]string{"--max-retry-after", "2h"}, nil, "", []string{"--max-retry-after 2h0m0s"}},
		{[]string{"--wait", "0s"}, nil, "", []string{"--wait 0s"}},
		{[]string{"--max-age", "-1s"}, nil, "", []string{"--max-age -1s"}},
		{[]string{"--store-timeout", "0s"}, nil, "", []string{"--store-timeout 0s"}},
		{[]string{"--fail", "maybe"}, nil, "", []string{`--fail "maybe"`, "closed, open, or share:N"}},
		{[]string{"--fail", "share:0"}, nil, "", []string{`--fail "share:0"`}},
		{[]string{"--log-format", "xml"}, nil, "", []string{`--log-format "xml"`}},
		{[]string{"--log-level", "loud"}, nil, "", []string{`--log-level "loud"`}},
		{[]string{"--listen", "8080"}, nil, "", []string{`--listen "8080"`}},
		{[]string{"--admin", "x:y"}, nil, "", []string{`--admin "x:y"`}},
		{[]string{"--trusted-proxy", "10.0.0.0/33"}, nil, "", []string{`--trusted-proxy "10.0.0.0/33"`}},
		{[]string{"--key", "header:"}, nil, "", []string{`--key "header:"`}},
		{[]string{"--key", "header:a b"}, nil, "", []string{`--key "header:a b"`}},
		{[]string{"--unknown", "0"}, nil, "", []string{`--unknown "0"`}},
		{[]string{"--match", "fuzzy"}, nil, "", []string{`--match "fuzzy"`, "exact, clean, prefix"}},
		{[]string{"--unknown-status", "200"}, nil, "", []string{"--unknown-status 200"}},
		{[]string{"--bad-rows", "maybe"}, nil, "", []string{`--bad-rows "maybe"`}},
		{[]string{"--otlp", "http://me:hush@c:4318"}, nil, "", []string{"--otlp", "without user"}},
		{[]string{"--unknown", "NaN"}, nil, "", []string{`--unknown "NaN"`}},
		{[]string{"--upstream", "ftp://u"}, nil, "", []string{`--upstream "ftp://u"`}},
		{[]string{"--upstream", "http://v:1"}, nil, "", []string{`--upstream "http://v:1"`, "one upstream for each prefix"}},
		{[]string{"--upstream", "/ibe=http://v:1", "--upstream", "/ibe/=http://w:1"}, nil, "", []string{`"/ibe/=http://w:1"`}},
		{[]string{"--upstream", "/x=http://me:hush@v"}, nil, "", []string{`"/x=http://xxxxx@v"`, "no user"}},
		{[]string{"--limits", "oracle://x"}, nil, "", []string{`--limits "oracle://x"`, "mysql://"}},
		{[]string{"--limits", "limits.db"}, nil, "", []string{`--limits "limits.db"`}},
		{[]string{"--limits", "sqlite://"}, nil, "", []string{`--limits "sqlite://"`}},
		{[]string{"--limits", "mysql://h:3306"}, nil, "", []string{`--limits "mysql://h:3306"`}},
		{[]string{"--limits", "postgres://h:port/d"}, nil, "", []string{"--limits", "postgres://"}},
		{[]string{"--table", "a b"}, nil, "", []string{`--table "a b"`}},
		{[]string{"--columns", "bucket"}, nil, "", []string{`--columns "bucket"`}},
		{[]string{"--columns", "nmae=bucket"}, nil, "", []string{`--columns "nmae=bucket"`}},
		{[]string{"--columns", "name=a b"}, nil, "", []string{"--columns", "a b"}},
		{[]string{"--jitter", "2s", "--quota"}, nil, "", []string{"--jitter 2s"}},
		{[]string{"--jitter", "2ms"}, nil, "", []string{"--jitter 2ms", "--quota"}},
		{[]string{"--switch", "redis:"}, nil, "", []string{`--switch "redis:"`}},
		{[]string{"--key-prefix", "{x}"}, nil, "", []string{`--key-prefix "{x}"`}},
		{[]string{"--redis", "localhost"}, nil, "", []string{`--redis "localhost"`}},
		{[]string{"--redis", "a:1,b"}, nil, "", []string{`--redis "a:1,b"`}},
		{[]string{"--redis", "redis+sentinel://h:1"}, nil, "", []string{`--redis "redis+sentinel://h:1"`}},
		{[]string{"--redis", "redis+ring://h:1"}, nil, "", []string{`--redis "redis+ring://h:1"`}},
		{[]string{"--store", "memory"}, nil, "", []string{`--redis "r:1"`, "--store memory"}},
	} {
		o, err := given(t, append(append([]string{}, enough...), tt.args...), tt.environ, tt.file)
		if err == nil {
			_, err = o.parse()
		}
		require.Error(t, err, "%q %q %q", tt.args, tt.environ, tt.file)
		for _, want := range tt.want {
			require.ErrorContains(t, err, want)
		}
		require.NotContains(t, err.Error(), "hush")
	}
	for flag, without := range map[string][]string{"upstream": enough[2:], "redis": enough[:4], "limits": {enough[0], enough[1], enough[4], enough[5]}} {
		o, err := given(t, without, nil, "")
		require.NoError(t, err)
		_, err = o.parse()
		require.ErrorContains(t, err, "--"+flag+" missing: want ")
	}
}

func TestGoodSettings(t *testing.T) {
	for _, args := range [][]string{
		nil,
		{"--switch", "sql", "--key", "client", "--unknown", "0.5", "--upstream", "/ibe=https://v/base", "--trusted-proxy", "10.0.0.0/8,192.0.2.1"},
		{"--switch", "redis:s", "--key", "header:X-Agency", "--unknown", "refuse", "--quota", "--jitter", "2ms", "--admin", ""},
		{"--columns", "name=bucket,rate=per_second,quota=q", "--jitter", "2ms", "--table", "s.limits"},
	} {
		o, err := given(t, append(append([]string{}, enough...), args...), nil, "")
		require.NoError(t, err)
		_, err = o.parse()
		require.NoError(t, err, "%q", args)
	}
	o, err := given(t, []string{"--upstream", "http://u", "--limits", "sqlite://f", "--store", "memory"}, nil, "")
	require.NoError(t, err)
	c, err := o.parse()
	require.NoError(t, err)
	require.Nil(t, c.redis)
}

package gateway

import (
	"bytes"
	"log/slog"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"

	"github.com/spf13/pflag"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// Proxies that are trusted from now on are also for clients' addresses in keys, though the key that came with them needs a new process.
func TestReloadedProxies(t *testing.T) {
	path := filepath.Join(t.TempDir(), "gateway.yaml")
	settings := func(more string) {
		text := "upstream: http://u:1\nlimits: sqlite://f\nstore: memory\n" + more
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
	}
	users := filepath.Join(t.TempDir(), "users")
	require.NoError(t, os.WriteFile(users, []byte("write ann a-token-of-hers-alone"), 0o600))
	settings("key: client\n")
	o := new(options)
	flags := pflag.NewFlagSet("gateway", pflag.ContinueOnError)
	for _, g := range o.flags() {
		flags.AddFlagSet(g.flags)
	}
	require.NoError(t, flags.Parse([]string{"--config", path, "--console-users", users}))
	require.NoError(t, o.load(flags, nil))
	c, err := o.parse()
	require.NoError(t, err)
	quiet := slog.New(slog.DiscardHandler)
	var log bytes.Buffer
	p, err := newProxy(c, quiet)
	require.NoError(t, err)
	limits, err := registry.New(registry.Static{{Name: "192.0.2.7", Rate: 1}}, tokenbucket.NewMemoryStore(), registry.WithLogger(quiet))
	require.NoError(t, err)
	t.Cleanup(limits.Close)
	p.metrics.limits.Store(limits)
	s := &service{config: c, log: slog.New(slog.NewTextHandler(&log, nil)), level: new(slog.LevelVar), proxy: p}
	r := httptest.NewRequest("GET", "/", nil)
	r.RemoteAddr = "10.0.0.1:1"
	r.Header.Set("X-Forwarded-For", "192.0.2.7")
	key := func() string {
		now := p.live.Load()
		return now.key.of(now, r, p.metrics.match)
	}
	require.Equal(t, "10.0.0.1", key())
	for range 2 {
		settings("key: client+path\ntrusted-proxy: 10.0.0.0/8\n")
		s.reload(t.Context())
		require.Equal(t, "192.0.2.7", key())
	}
	told := func() string {
		was := log.Len()
		s.reload(t.Context())
		return log.String()[was:]
	}
	settings("key: client\ntrusted-proxy: 10.0.0.0/8\n")
	require.Contains(t, told(), `changed=""`, "a key that was not taken over is taken back")
	require.NotContains(t, log.String(), "console-users")
	require.NoError(t, os.WriteFile(users, nil, 0o600))
	require.Contains(t, told(), `msg="changed settings take effect only after a restart" settings=console-users`, "ann can still come in")
	settings("key: path\n")
	require.Contains(t, told(), "changed=key,trusted-proxy")
	require.Equal(t, "/", key())
}

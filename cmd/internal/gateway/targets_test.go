package gateway

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestMySQL(t *testing.T) {
	for _, tt := range []struct{ given, user, password, net, addr, name string }{
		{"me:pass@db:3307/limits", "me", "pass", "tcp", "db:3307", "limits"},
		{"me:p%40%2Fss@db/limits?tls=true", "me", "p@/ss", "tcp", "db:3306", "limits"},
		{"root@[::1]:3306/limits", "root", "", "tcp", "[::1]:3306", "limits"},
		{"root:@tcp(127.0.0.1:3306)/test?timeout=10s", "root", "", "tcp", "127.0.0.1:3306", "test"},
		{"me:p@ss/word@unix(/run/mysqld.sock)/limits", "me", "p@ss/word", "unix", "/run/mysqld.sock", "limits"},
	} {
		c, want := parseMySQL(tt.given)
		require.Empty(t, want, tt.given)
		require.Equal(t, []string{tt.user, tt.password, tt.net, tt.addr, tt.name}, []string{c.User, c.Passwd, c.Net, c.Addr, c.DBName})
		require.Positive(t, c.Timeout)
	}
	c, want := parseMySQL("me:pass@db.example/limits?tls=true&timeout=9s")
	require.Empty(t, want)
	require.Equal(t, "db.example", c.TLS.ServerName)
	require.Equal(t, 9*time.Second, c.Timeout)
}

func TestRedisTargets(t *testing.T) {
	one, err := parseRedis("h:1")
	require.NoError(t, err)
	require.Equal(t, "h:1", one.single.Addr)
	one, err = parseRedis("rediss://me:pass@h:1/2")
	require.NoError(t, err)
	require.Equal(t, []any{"h:1", "me", "pass", 2}, []any{one.single.Addr, one.single.Username, one.single.Password, one.single.DB})
	require.NotNil(t, one.single.TLSConfig)
	one, err = parseRedis("unix:///run/redis.sock")
	require.NoError(t, err)
	require.Equal(t, "/run/redis.sock", one.single.Addr)

	many, err := parseRedis("a:1,b:2")
	require.NoError(t, err)
	require.Equal(t, []string{"a:1", "b:2"}, many.cluster.Addrs)
	many, err = parseRedis("rediss+cluster://:pass@a:1?addr=b:2")
	require.NoError(t, err)
	require.Equal(t, []string{"a:1", "b:2"}, many.cluster.Addrs)
	require.Equal(t, "pass", many.cluster.Password)
	require.NotNil(t, many.cluster.TLSConfig)

	watched, err := parseRedis("redis+sentinel://a:1/3?addr=b:2&master_name=m&password=pass")
	require.NoError(t, err)
	require.Equal(t, []any{"m", []string{"a:1", "b:2"}, "pass", 3},
		[]any{watched.sentinel.MasterName, watched.sentinel.SentinelAddrs, watched.sentinel.Password, watched.sentinel.DB})
}

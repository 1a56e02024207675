package main

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// check prints the rows that would be in force, and each fault, before a gateway is started with them.
func TestCheck(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	eachServer(t, func(t *testing.T, table limitsTable) {
		check := func(more ...string) (int, string) {
			args := append([]string{"check", "--upstream", "http://u:1", "--limits", table.dsn, "--redis", server.Addr, "--wait", "5s"}, more...)
			status, out, errs := execute(context.Background(), args...)
			require.NotContains(t, out+errs, "hush")
			return status, out + errs
		}
		faulty := func(want string, more ...string) {
			t.Helper()
			status, out := check(more...)
			require.NotEqual(t, exitOK, status, out)
			require.Contains(t, out, want)
		}
		warned := func(want string, more ...string) {
			t.Helper()
			status, out := check(more...)
			require.Equal(t, exitOK, status, out)
			require.Contains(t, out, want)
		}
		faulty("--create-table creates a missing table")
		warned("warn  table t_ratelimite_conf of ", "--create-table")
		warned("the table does not exist yet: a gateway creates it (--create-table)", "--create-table", "--switch", "sql")
		faulty("--create-table creates a missing table")
		require.NoError(t, createTables(table))
		warned("warn  there are no limits: --unknown decides about every call")
		execSQL(t, table.DB, "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/a', 2.5, 0.3)")
		warned("ok    row 1: /a: 2.5/s, saves up 2.5, waits up to 300 ms")
		execSQL(t, table.DB, "UPDATE t_ratelimite_conf SET disabled = 1")
		warned("warn  every limit is off: its calls pass")
		execSQL(t, table.DB, "UPDATE t_ratelimite_conf SET disabled = 0")
		execSQL(t, table.DB, "INSERT INTO t_ratelimite_conf (name, rate, max_wait, shadow, per_key) VALUES ('/dry', 5, 0, 1, 0), ('no/slash', 5, 0, 0, 0), ('/each', 5, 0, 0, 1)")
		warned("warn  row 2: /dry: in shadow: 5/s, saves up 5, does not wait")
		warned("warn  row 3: no/slash matches no call: a path begins with a slash")
		warned("warn  row 4: /each has one bucket although per_key is set: --key path has one part, and the row names all of it")
		warned("ok    row 4: /each: 5/s for each key, saves up 5, does not wait\n")
		warned("warn  row 1: /a matches no call: --key client gives addresses", "--key", "client")
		warned("warn  shadow: all calls are counted, none is refused", "--shadow")
		faulty(`--key "path+clent": part "clent": want path, client or header:NAME, or several of them with + between: did you mean client?`, "--key", "path+clent")
		execSQL(t, table.DB, "DELETE FROM t_ratelimite_conf WHERE name <> '/a'")
		warned("ok    redis: rights of --store script")
		warned("ok    redis: rights of --store lock", "--store", "lock")
		warned("ok    redis: evicts nothing (maxmemory 0, noeviction)")
		warned("ok    the switch is on: limits apply", "--switch", "sql")
		execSQL(t, table.DB, "INSERT INTO t_ratelimite_switch (name, enabled) VALUES ('global', 0)")
		warned("warn  the switch is off: every call passes: at ", "--switch", "sql")
		execSQL(t, table.DB, "ALTER TABLE t_ratelimite_conf ADD win DECIMAL(10,3)")
		execSQL(t, table.DB, "ALTER TABLE t_ratelimite_conf ADD lim INT")
		execSQL(t, table.DB, "ALTER TABLE t_ratelimite_conf ADD conc INT")
		const columns = "window=win,window_limit=lim,concurrent=conc"
		_, out := check("--columns", columns)
		require.NotContains(t, out, "rows with a window")
		execSQL(t, table.DB, "UPDATE t_ratelimite_conf SET win = 86400, lim = 10000, conc = 20")
		warned("ok    row 1: /a: 2.5/s, saves up 2.5, at most 10,000 in any 1 d, at most 20 at once, waits up to 300 ms", "--columns", columns)
		warned("ok    redis: rights of rows with a window or a concurrency", "--columns", columns)
		execSQL(t, table.DB, "UPDATE t_ratelimite_conf SET conc = -1")
		faulty("conc -1: want a whole number of calls, 1 to 2147483647, or NULL; its calls are refused", "--columns", columns)
		execSQL(t, table.DB, "INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/b', -5, 0)")
		faulty(`; its calls are refused`)
		faulty(`; its calls pass without a limit`, "--bad-rows", "pass")
		execSQL(t, table.DB, "UPDATE t_ratelimite_conf SET rate = 5")
		alter := map[string]string{"MariaDB": "MODIFY rate INT", "PostgreSQL": "ALTER COLUMN rate TYPE integer"}[table.server]
		execSQL(t, table.DB, "ALTER TABLE t_ratelimite_conf "+alter)
		warned("the rate column stores whole numbers only")
		faulty("FAIL  redis cannot be reached: calls are answered with 503 (--fail closed): dial tcp 127.0.0.1:1: connect: connection refused", "--redis", "127.0.0.1:1")
		faulty("FAIL  redis refuses this gateway: calls are answered with 503: WRONGPASS", "--redis", "redis://me:hush@"+server.Addr)
		faulty("FAIL  table nowhere", "--table", "nowhere")
		faulty(`--fail "maybe": want`, "--fail", "maybe")
		faulty("unknown flag: --intervall: did you mean --interval?", "--intervall", "1s")
		faulty("connection refused", "--limits", "mysql://me:hush@127.0.0.1:1/limits")

		client := redis.NewClient(&redis.Options{Addr: server.Addr})
		defer func() { _ = client.Close() }()
		user := strings.ToLower(table.server)
		require.NoError(t, client.Do(t.Context(), "ACL", "SETUSER", user, "on", ">hush", "~*", "&*", "+ping", "+time", "+client", "+hello", "+get").Err())
		faulty("FAIL  redis refuses this gateway: calls are answered with 503: NOPERM", "--redis", "redis://"+user+":hush@"+server.Addr)
		warned("warn  redis: its eviction policy cannot be read, which needs +info: NOPERM", "--redis", "redis://"+user+":hush@"+server.Addr, "--switch", "redis:on", "--store", "memory")
	})
}

// A database that hangs is one fault, and not one of Redis, too.
func TestCheckDatabaseHangs(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	silent, err := net.Listen("tcp", "127.0.0.1:0") // it is connected to, and never answers
	require.NoError(t, err)
	defer func() { _ = silent.Close() }()
	began := time.Now()
	_, out, _ := execute(context.Background(), "check", "--upstream", "http://u:1", "--limits", "mysql://me:hush@"+silent.Addr().String()+"/limits",
		"--redis", server.Addr, "--wait", "3s")
	require.Contains(t, out, "FAIL  table ")
	require.Contains(t, out, "ok    redis: ok")
	require.NotContains(t, out, "FAIL  redis")
	t.Log("checked after", time.Since(began))
	require.Less(t, time.Since(began), 15*time.Second)
}

// createTables makes what --create-table does.
func createTables(table limitsTable) error {
	dialect := map[string]sqlsource.Dialect{"MariaDB": sqlsource.MySQL, "PostgreSQL": sqlsource.PostgreSQL}[table.server]
	return errors.Join(sqlsource.CreateTable(context.Background(), table.DB, dialect), sqlsource.CreateSwitchTable(context.Background(), table.DB, dialect))
}

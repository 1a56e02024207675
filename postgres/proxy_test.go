package postgres

import (
	"net"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// pooler stands between clients and a server, and gives each transaction another connection of the server: what proxies
// do that pool by transaction.
type pooler struct {
	dsn     string
	servers chan *pgconn.HijackedConn
	all     []*pgconn.HijackedConn
}

func startPooler(t *testing.T, server *dbtest.Server, size int) *pooler {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	p := &pooler{servers: make(chan *pgconn.HijackedConn, size)}
	p.dsn = "postgres://postgres@" + l.Addr().String() + "/postgres?sslmode=disable"
	for range size {
		conn, err := pgconn.Connect(ctx, server.DSN())
		require.NoError(t, err)
		hijacked, err := conn.Hijack()
		require.NoError(t, err)
		p.all = append(p.all, hijacked)
		p.servers <- hijacked
	}
	var running sync.WaitGroup
	var clients sync.Map
	running.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			clients.Store(c, true)
			running.Go(func() { defer func() { _ = c.Close() }(); _ = p.serve(c) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		clients.Range(func(c, _ any) bool { _ = c.(net.Conn).Close(); return true })
		for _, s := range p.all {
			_ = s.Conn.Close()
		}
		running.Wait()
	})
	return p
}

// serve is the life of one client's connection.
func (p *pooler) serve(c net.Conn) error {
	client := pgproto3.NewBackend(c, c)
	start, err := client.ReceiveStartupMessage()
	if err != nil {
		return err
	}
	if _, ok := start.(*pgproto3.StartupMessage); !ok { // it wants to cancel
		return nil
	}
	client.Send(&pgproto3.AuthenticationOk{})
	for name, v := range map[string]string{"standard_conforming_strings": "on", "client_encoding": "UTF8", "server_version": "15"} {
		client.Send(&pgproto3.ParameterStatus{Name: name, Value: v})
	}
	client.Send(&pgproto3.BackendKeyData{ProcessID: 1, SecretKey: 1})
	client.Send(&pgproto3.ReadyForQuery{TxStatus: 'I'})
	for {
		if err := client.Flush(); err != nil {
			return err
		}
		if err := p.transaction(client); err != nil {
			return err
		}
	}
}

// transaction takes a connection of the server from the first message to when it is idle again.
func (p *pooler) transaction(client *pgproto3.Backend) error {
	message, err := client.Receive()
	if err != nil {
		return err
	}
	server, ok := <-p.servers
	if !ok {
		return net.ErrClosed
	}
	defer func() { p.servers <- server }()
	for {
		if _, ok := message.(*pgproto3.Terminate); ok {
			return net.ErrClosed
		}
		server.Frontend.Send(message)
		_, query := message.(*pgproto3.Query)
		if _, sync := message.(*pgproto3.Sync); sync || query {
			if err := server.Frontend.Flush(); err != nil {
				return err
			}
			idle, err := answer(client, server)
			if err != nil || idle {
				return err
			}
			if err := client.Flush(); err != nil {
				return err
			}
		}
		if message, err = client.Receive(); err != nil {
			return err
		}
	}
}

func answer(client *pgproto3.Backend, server *pgconn.HijackedConn) (idle bool, err error) {
	for {
		message, err := server.Frontend.Receive()
		if err != nil {
			return false, err
		}
		client.Send(message)
		if ready, ok := message.(*pgproto3.ReadyForQuery); ok {
			return ready.TxStatus == 'I', nil
		}
	}
}

// TestBehindProxy: behind a proxy that pools by transaction all works, only the wake-up needs a connection of its own.
func TestBehindProxy(t *testing.T) {
	server := dbtest.SharedPostgreSQL(t)
	direct, schema := opened(t)
	p := startPooler(t, server, 3)
	pool := pooled(t, p.dsn)
	require.NoError(t, Migrate(ctx, pool, WithSchema("behind proxy")), "migrations too")
	const lease = 900 * time.Millisecond // so a waiter's sign of life comes every 300 ms, and its loss is found after 600 ms

	// wait returns how long after the release a waiter is admitted.
	wait := func(s *Store, name string, listens bool) time.Duration {
		holder, waiter := opens(t, s, name, 1), opens(t, s, name, 1, semaphore.WithLease(lease))
		held, err := holder.Acquire(ctx, 1)
		require.NoError(t, err)
		admitted := make(chan time.Time)
		go func() {
			got, err := waiter.Acquire(ctx, 1)
			if err == nil {
				admitted <- time.Now()
				_ = got.Release(ctx)
			}
			close(admitted)
		}()
		kept := &semaphoreStore{store: s, name: name}
		eventually(t, "nobody queues", func() bool {
			return value(t, s, "SELECT count(*) FROM %s.semaphore_slot WHERE kind = 2") == 1
		})
		if listens {
			eventually(t, "it does not listen", func() bool {
				return value(t, s, `SELECT count(*) FROM %s.semaphore_slot w JOIN %s.semaphore_slot p ON p.kind = 4 AND p.id = w.process
					JOIN pg_stat_activity ON query = 'LISTEN "' || p.label || '"' AND state = 'idle' WHERE w.kind = 2`) == 1
			})
		}
		holders, err := kept.Holders(ctx)
		require.NoError(t, err)
		require.Len(t, holders, 1)
		released := time.Now()
		require.NoError(t, held.Release(ctx))
		at, ok := <-admitted
		require.True(t, ok)
		return at.Sub(released)
	}
	for name, open := range map[string]func() *Store{
		"nobody listens": func() *Store { return newStore(t, pool, schema) },
		"past the proxy": func() *Store { return newStore(t, pool, schema, WithListenConfig(direct.Config().ConnConfig)) },
		"no proxy":       func() *Store { return newStore(t, direct, schema) },
	} {
		t.Run(name, func(t *testing.T) {
			longest := time.Duration(0)
			for range 3 {
				took := wait(open(), name, name != "nobody listens")
				t.Log("admitted", took, "after the release")
				require.Less(t, took, lease*2/3+5*time.Second)
				longest = max(longest, took)
			}
			if name == "nobody listens" {
				require.Greater(t, longest, time.Millisecond)
			}
		})
	}
	// Nothing of a session is left in the server's connections.
	for range len(p.all) {
		require.Zero(t, value(t, newStore(t, pool, schema), `SELECT (SELECT count(*) FROM pg_prepared_statements WHERE NOT from_sql) +
			(SELECT count(*) FROM pg_listening_channels()) +
			(SELECT count(*) FROM pg_locks WHERE locktype = 'advisory')`))
	}
}

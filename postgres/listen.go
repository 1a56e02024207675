package postgres

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	listenTimeout = 5 * time.Second  // of each operation on the connection
	listenPing    = 10 * time.Second // the connection is checked after this long without a notification
	listenPause   = time.Second      // after it failed
	proxyPause    = time.Minute      // after it turned out to lead to a proxy
)

// errProxy: the connection does not lead directly to the server.
var errProxy = errors.New("postgres: LISTEN does not work through a proxy that pools connections by transaction: see WithListenConfig")

// listener is the one connection on which a process listens, for all its subscriptions. It exists while there are any.
type listener struct {
	connect func(ctx context.Context, receive func(*pgconn.Notification)) (*pgx.Conn, error)

	mu         sync.Mutex
	connection *connection // nil without subscriptions
}

// connection is a connection to the server, from the first subscription to the last. The listener's mu guards its fields.
type connection struct {
	subscribed map[*subscription]bool
	ctx        context.Context
	close      context.CancelFunc
	interrupt  context.CancelFunc // ends the wait for a notification, because the subscriptions have changed
}

// subscription receives the notifications of one channel.
type subscription struct {
	channel string
	ready   chan struct{} // receives when take has something to return

	mu      sync.Mutex
	started bool // the server listens on the channel
	begun   bool // and take has not returned that yet
	news    []string
	err     error
}

func newListener(pool *pgxpool.Pool, own *pgx.ConnConfig) *listener {
	return &listener{connect: func(ctx context.Context, receive func(*pgconn.Notification)) (*pgx.Conn, error) {
		c := own
		if own == nil {
			config := pool.Config()
			c = config.ConnConfig
			if config.BeforeConnect != nil { // it may set the password
				if err := config.BeforeConnect(ctx, c); err != nil {
					return nil, err
				}
			}
		}
		c = c.Copy()
		c.OnNotification = func(_ *pgconn.PgConn, n *pgconn.Notification) { receive(n) }
		conn, err := pgx.ConnectConfig(ctx, c)
		if err != nil || own != nil {
			return conn, err
		}
		var pid uint32
		err = conn.QueryRow(ctx, "SELECT pg_backend_pid()", pgx.QueryExecModeExec).Scan(&pid)
		if err == nil && pid != conn.PgConn().PID() {
			err = errProxy
		}
		if err != nil {
			closeConn(conn)
			return nil, err
		}
		return conn, nil
	}}
}

func closeConn(conn *pgx.Conn) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx)
}

// join adds a subscription. Its caller must call leave.
func (h *listener) join(channel string) *subscription {
	e := &subscription{channel: channel, ready: make(chan struct{}, 1)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.connection == nil {
		l := &connection{subscribed: map[*subscription]bool{}}
		l.ctx, l.close = context.WithCancel(context.Background())
		l.interrupt = func() {}
		h.connection = l
		go h.run(l)
	}
	h.connection.subscribed[e] = true
	h.connection.interrupt()
	return e
}

func (h *listener) leave(e *subscription) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l := h.connection
	if l == nil || !l.subscribed[e] {
		return // the connection was lost
	}
	delete(l.subscribed, e)
	l.interrupt()
	if len(l.subscribed) == 0 {
		l.close()
		h.connection = nil
	}
}

// run lives as long as the connection.
func (h *listener) run(l *connection) {
	err := h.talk(l)
	pause := time.Duration(0)
	if errors.Is(err, errProxy) {
		pause = proxyPause
	} else if connectError := new(pgconn.ConnectError); errors.As(err, &connectError) {
		pause = listenPause/2 + rand.N(listenPause)
	}
	select { // before the listeners try again
	case <-time.After(pause):
	case <-l.ctx.Done():
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	l.close()
	if h.connection == l {
		h.connection = nil
	}
	for e := range l.subscribed {
		e.update(func() { e.err = err })
	}
}

// talk returns why the connection could not be made, or was lost.
func (h *listener) talk(l *connection) error {
	ctx, cancel := context.WithTimeout(l.ctx, 2*listenTimeout)
	conn, err := h.connect(ctx, func(n *pgconn.Notification) { h.received(l, n) })
	cancel()
	if err != nil {
		return err
	}
	defer closeConn(conn)
	listening := map[string]bool{}
	for {
		h.mu.Lock()
		subscribed := map[string][]*subscription{}
		for e := range l.subscribed {
			subscribed[e.channel] = append(subscribed[e.channel], e)
		}
		wait, interrupt := context.WithTimeout(l.ctx, listenPing)
		l.interrupt = interrupt
		h.mu.Unlock()
		err := subscribe(l.ctx, conn, listening, subscribed)
		if err == nil {
			err = conn.PgConn().WaitForNotification(wait)
		}
		if err != nil && wait.Err() == context.DeadlineExceeded {
			err = ask(l.ctx, conn, "")
		} else if wait.Err() != nil {
			err = nil
		}
		interrupt()
		if err == nil {
			err = l.ctx.Err()
		}
		if err != nil {
			return err
		}
	}
}

// subscribe listens on the channels of the subscriptions, and on no others.
func subscribe(ctx context.Context, conn *pgx.Conn, listening map[string]bool, subscribed map[string][]*subscription) error {
	for channel := range listening {
		if subscribed[channel] == nil {
			if err := ask(ctx, conn, "UNLISTEN "+quoted(channel)); err != nil {
				return err
			}
			delete(listening, channel)
		}
	}
	for channel, all := range subscribed {
		if !listening[channel] {
			if err := ask(ctx, conn, "LISTEN "+quoted(channel)); err != nil {
				return err
			}
			listening[channel] = true
		}
		for _, e := range all {
			e.begin()
		}
	}
	return nil
}

func ask(ctx context.Context, conn *pgx.Conn, sql string) error {
	ctx, cancel := context.WithTimeout(ctx, listenTimeout)
	defer cancel()
	_, err := conn.Exec(ctx, sql, pgx.QueryExecModeSimpleProtocol)
	return err
}

func (h *listener) received(l *connection, n *pgconn.Notification) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for e := range l.subscribed {
		if e.channel == n.Channel {
			e.update(func() { e.news = append(e.news, n.Payload) })
		}
	}
}

func (e *subscription) begin() {
	e.mu.Lock()
	started := e.started
	e.started = true
	e.mu.Unlock()
	if !started {
		e.update(func() { e.begun = true })
	}
}

// update changes the result of take.
func (e *subscription) update(change func()) {
	e.mu.Lock()
	change()
	e.mu.Unlock()
	select {
	case e.ready <- struct{}{}:
	default:
	}
}

// take returns the notifications since the last call.
func (e *subscription) take() (begun bool, news []string, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	begun, news, err = e.begun, e.news, e.err
	e.begun, e.news = false, nil
	return begun, news, err
}

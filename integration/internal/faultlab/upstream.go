package faultlab

import (
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Upstream counts the calls that reach it, a byte a call, and notes when each does. Its methods may be called by many goroutines
// at once.
type Upstream struct {
	Addr string

	listener net.Listener
	readers  sync.WaitGroup

	mu       sync.Mutex
	arrivals []Event
}

// StartUpstream starts an upstream that lives as long as the test, or until End.
func StartUpstream(t testing.TB) *Upstream {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	u := &Upstream{Addr: l.Addr().String(), listener: l}
	u.readers.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			u.readers.Go(func() { u.read(conn) })
		}
	})
	t.Cleanup(func() { _ = l.Close() })
	return u
}

func (u *Upstream) read(conn net.Conn) {
	defer func() { _ = conn.Close() }()
	buf := make([]byte, 4096)
	for {
		n, err := conn.Read(buf)
		if err != nil {
			return
		}
		u.mu.Lock()
		u.arrivals = append(u.arrivals, Event{At: Micros(), Permits: n})
		u.mu.Unlock()
	}
}

// Count returns the number of calls that have arrived so far.
func (u *Upstream) Count() int { return u.Between(0, 1<<62) }

// Between returns the number of calls that have arrived from one time, by Micros, until before another.
func (u *Upstream) Between(from, until int64) (n int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, a := range u.arrivals {
		if a.At >= from && a.At < until {
			n += a.Permits
		}
	}
	return n
}

// End waits until all callers of the upstream have closed their connections, ends it and returns all arrivals.
func (u *Upstream) End() []Event {
	_ = u.listener.Close()
	u.readers.Wait()
	return slices.Clone(u.arrivals)
}

// Caller calls an upstream. It may be used by many goroutines at once.
type Caller struct {
	mu   sync.Mutex
	conn net.Conn
}

// Dial returns a caller of the upstream at that address.
func Dial(addr string) (*Caller, error) {
	conn, err := net.Dial("tcp", addr)
	return &Caller{conn: conn}, err
}

// Call calls the upstream once.
func (c *Caller) Call() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.conn.Write([]byte{1})
	return err
}

// Close hangs up.
func (c *Caller) Close() error { return c.conn.Close() }

// origin ties this process' monotonic clock to microseconds of the machine's.
var origin = time.Now()

// Micros returns the time in microseconds since 1970 by this machine's clock as it was when the process began, advanced by the monotonic
// clock. The times of all processes compare, except for steps of the machine's clock in between.
func Micros() int64 { return micros(time.Now()) }

func micros(t time.Time) int64 { return origin.UnixMicro() + t.Sub(origin).Microseconds() }

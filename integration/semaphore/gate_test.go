package semaphore

import (
	"bytes"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// gate stands between a client and a server. Data that it holds back stays in order and is not lost, as on a network that hangs. It
// distinguishes connections that subscribe.
type gate struct {
	addr   string
	target atomic.Pointer[string]

	mu      sync.Mutex
	links   map[*link]bool
	stopped map[stream]bool
	moved   *sync.Cond // stopped, or closed, has changed
	closed  bool
	pubsubs int // connections that have subscribed
}

type stream int

const (
	requests stream = iota // of any connection
	replies
	messages // the replies of connections that subscribe
)

type link struct {
	client, server net.Conn
	pubsub         bool
}

func startGate(t *testing.T, target string) *gate {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	g := &gate{addr: l.Addr().String(), links: map[*link]bool{}, stopped: map[stream]bool{}}
	g.moved = sync.NewCond(&g.mu)
	g.lead(target)
	var running sync.WaitGroup
	running.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", *g.target.Load())
			if err != nil {
				_ = client.Close()
				continue
			}
			k := &link{client: client, server: server}
			g.mu.Lock()
			g.links[k] = true
			g.mu.Unlock()
			running.Go(func() { g.pump(k, server, client, requests) })
			running.Go(func() { g.pump(k, client, server, replies) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		g.mu.Lock()
		g.closed = true
		g.moved.Broadcast()
		g.mu.Unlock()
		g.cut(requests)
		running.Wait()
	})
	return g
}

// lead sets where new connections lead to.
func (g *gate) lead(target string) { g.target.Store(&target) }

// stop stops some streams from now on, or lets them go on.
func (g *gate) stop(these bool, all ...stream) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, s := range all {
		g.stopped[s] = these
	}
	g.moved.Broadcast()
}

// cut closes connections: all of them, or those that subscribe (messages).
func (g *gate) cut(s stream) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for k := range g.links {
		if s != messages || k.pubsub {
			_ = k.client.Close()
			_ = k.server.Close()
		}
	}
}

// subscribed is how many connections have subscribed so far.
func (g *gate) subscribed() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.pubsubs
}

func (g *gate) pump(k *link, to, from net.Conn, s stream) {
	defer func() {
		_ = to.Close()
		_ = from.Close()
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.links, k)
	}()
	buf := make([]byte, 64<<10)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		g.mu.Lock()
		if s == requests && !k.pubsub && bytes.Contains(buf[:n], []byte("subscribe")) {
			k.pubsub = true
			g.pubsubs++
		}
		for !g.closed && (g.stopped[s] || s == replies && k.pubsub && g.stopped[messages]) {
			g.moved.Wait()
		}
		g.mu.Unlock()
		if _, err := to.Write(buf[:n]); err != nil {
			return
		}
	}
}

package redistest

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"
)

// Fault is a fault that a Proxy applies to one request.
type Fault uint8

// Faults. A request that does not match has none.
const (
	// None: request and reply pass.
	None Fault = iota
	// LoseReply: the server executes the request, and the reply is dropped. The connection stays silent until the client closes it, as if
	// the network had lost the reply.
	LoseReply
	// CutAfter: the server executes the request, and the connection is closed instead of the reply.
	CutAfter
	// CutBefore: the connection is reset, and the server does not receive the request.
	CutBefore
	// Twice: the server executes the request twice in a row, and the client gets the first reply.
	Twice
)

// Network is the state of the link that a Proxy stands for.
type Network uint8

// The states of a network.
const (
	// Up: bytes pass.
	Up Network = iota
	// Stalled: connections are accepted, and no byte passes in either direction until the network is up again.
	Stalled
	// Cut: as Stalled, but new connections are neither accepted nor refused.
	Cut
	// Down: connections are reset and refused.
	Down
)

// Proxy forwards between clients and a redis-server and simulates network faults. It is safe for concurrent use, and its settings take effect
// at once. It parses requests and replies, so a fault applies to exactly one request. Commands with more than one reply (MONITOR, or SUBSCRIBE
// in RESP2) must not be sent through it.
type Proxy struct {
	// Addr is the address of the proxy. It does not change while the network is down.
	Addr string

	t testing.TB

	mu          sync.Mutex
	server      string
	changed     *sync.Cond // signals changes of network and the end of connections
	network     Network
	listener    *net.TCPListener
	fillers     []net.Conn // fill the accept queue while Cut
	links       map[*link]struct{}
	running     sync.WaitGroup
	match       string
	fault       func(n int64, args []string) Fault
	seen, bit   int64
	accepted    int
	outstanding int
	most        int
	delay       time.Duration
	jitter      time.Duration
	random      *rand.Rand
	speed       float64   // bytes per second; 0 for no limit
	clear       time.Time // when the bytes sent so far have been transmitted at that speed
}

// link is one client's connection and the proxy's own to the server.
type link struct {
	proxy          *Proxy
	client, server net.Conn
	toServer       chan frame
	toClient       chan frame
	end            chan struct{} // closed with the link
	closing        sync.Once

	mu      sync.Mutex
	pending []Fault // faults of the requests without a reply, in order
	mute    bool
	gone    bool
}

// frame is a request or a reply in transit.
type frame struct {
	data []byte
	due  time.Time
	cut  bool // close the connection instead of sending
}

// Further values in pending: a request that did not match, and the repetition of a request, whose reply is dropped.
const (
	ordinary Fault = 255 - iota
	spare
)

// StartProxy starts a proxy to a server for the duration of the test. Initially it has no faults.
func StartProxy(t testing.TB, server string) *Proxy {
	t.Helper()
	p := &Proxy{t: t, server: server, links: map[*link]struct{}{}}
	p.changed = sync.NewCond(&p.mu)
	for attempt := 0; p.listener == nil; attempt++ {
		p.Addr = FreeAddr()
		if err := p.listen(); err != nil && attempt == 50 {
			t.Fatal(err)
		}
	}
	t.Cleanup(p.close)
	return p
}

// Match applies faults to the requests that contain the text. fault returns the fault of the n-th of them, counted from 1; args are the
// arguments of the request. Calls of fault do not overlap, and it must not call the proxy. A nil fault means no faults. Match resets Seen and
// Bit.
func (p *Proxy) Match(text string, fault func(n int64, args []string) Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.match, p.fault, p.seen, p.bit = text, fault, 0, 0
}

// Only returns a function for Match that applies a fault to the nth request only.
func Only(nth int64, fault Fault) func(n int64, args []string) Fault {
	return func(n int64, _ []string) Fault {
		if n == nth {
			return fault
		}
		return None
	}
}

// Seen returns the number of requests that matched.
func (p *Proxy) Seen() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return int(p.seen)
}

// Bit returns the number of requests with a fault.
func (p *Proxy) Bit() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return int(p.bit)
}

// Accepted returns the number of connections accepted so far.
func (p *Proxy) Accepted() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.accepted
}

// Outstanding returns the maximum number of matching requests without a reply since its last call.
func (p *Proxy) Outstanding() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	most := p.most
	p.most = p.outstanding
	return most
}

// Delay delays each request and each reply by mean ± jitter. Frames of a connection keep their order. The proxy takes over random.
func (p *Proxy) Delay(mean, jitter time.Duration, random *rand.Rand) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.delay, p.jitter, p.random = mean, jitter, random
}

// Throttle bounds the bytes per second of all connections together, in both directions. 0 means no bound.
func (p *Proxy) Throttle(bytesPerSecond float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.speed, p.clear = bytesPerSecond, time.Time{}
}

// Set changes the state of the network. Bytes in transit while it was stalled or cut arrive when it is up again, as with TCP retransmission.
func (p *Proxy) Set(n Network) {
	p.t.Helper()
	p.mu.Lock()
	defer p.mu.Unlock()
	if n == p.network {
		return
	}
	if p.network == Cut {
		p.answer()
	}
	p.network = n
	if n == Down {
		_ = p.listener.Close()
		p.listener = nil
		p.cutAll()
	}
	for deadline := time.Now().Add(5 * time.Second); n != Down && p.listener == nil; {
		if err := p.listen(); err == nil {
			break
		} else if time.Now().After(deadline) {
			p.t.Errorf("proxy: %v", err)
			break
		}
		time.Sleep(time.Millisecond)
	}
	if n == Cut && p.listener != nil {
		if err := p.silence(); err != nil {
			p.t.Errorf("proxy: %v", err)
		}
	}
	p.changed.Broadcast()
}

// Lead directs new connections to another server, or closes them if it is "". Existing connections stay until Reset.
func (p *Proxy) Lead(server string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.server = server
}

// Reset closes all connections.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cutAll()
}

func (p *Proxy) cutAll() {
	for l := range p.links {
		l.close(true)
	}
	p.changed.Broadcast()
}

// listen starts to accept connections. p.mu must be held, except by StartProxy.
func (p *Proxy) listen() error {
	l, err := net.Listen("tcp", p.Addr)
	if err != nil {
		return err
	}
	p.listener = l.(*net.TCPListener)
	p.running.Go(func() { p.accept(l) })
	return nil
}

// silence keeps the kernel from answering new connections: it stops accepting, and shortens and fills the accept queue. p.mu must be held.
func (p *Proxy) silence() error {
	raw, err := p.listener.SyscallConn()
	if err != nil {
		return err
	}
	p.fillers = nil
	if err := p.listener.SetDeadline(time.Unix(1, 0)); err != nil { // ends accepting, for now
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = setBacklog(fd, 0) }); err != nil || failed != nil {
		return errors.Join(err, failed)
	}
	for silent := 0; ; { // on a busy machine one dial may time out by itself, so require two in a row
		c, err := net.DialTimeout("tcp", p.Addr, 100*time.Millisecond)
		if err != nil {
			var timeout net.Error
			if !errors.As(err, &timeout) || !timeout.Timeout() {
				return err
			}
			if silent++; silent == 2 {
				return nil
			}
			continue
		}
		silent = 0
		if p.fillers = append(p.fillers, c); len(p.fillers) == 64 {
			return fmt.Errorf("%s still accepts connections", p.Addr)
		}
	}
}

// answer undoes silence. p.mu must be held.
func (p *Proxy) answer() {
	for _, c := range p.fillers {
		_ = c.Close()
	}
	if raw, err := p.listener.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _ = setBacklog(fd, 4096) })
	}
	_ = p.listener.SetDeadline(time.Time{})
}

func (p *Proxy) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			return
		}
		p.mu.Lock()
		for p.network == Cut {
			p.changed.Wait()
		}
		if client == nil {
			p.mu.Unlock()
			continue
		}
		nobody, to := p.network == Down || p.filler(client), p.server
		p.mu.Unlock()
		if nobody {
			_ = client.Close()
			continue
		}
		server, err := net.Dial("tcp", to)
		if err != nil {
			reset(client)
			continue
		}
		l := &link{
			proxy: p, client: client, server: server,
			toServer: make(chan frame, 1024), toClient: make(chan frame, 1024), end: make(chan struct{}),
		}
		p.mu.Lock()
		p.accepted++
		p.links[l] = struct{}{}
		if p.network == Down || p.server != to {
			l.close(true)
		}
		p.mu.Unlock()
		p.running.Go(l.requests)
		p.running.Go(l.replies)
		p.running.Go(l.sendOn)
		p.running.Go(l.sendBack)
	}
}

// filler reports whether a connection is one of p.fillers. p.mu must be held.
func (p *Proxy) filler(c net.Conn) bool {
	return slices.ContainsFunc(p.fillers, func(f net.Conn) bool { return f.LocalAddr().String() == c.RemoteAddr().String() })
}

// close stops the proxy and closes its connections.
func (p *Proxy) close() {
	p.Set(Down)
	p.running.Wait()
}

// The goroutines of a link: requests reads what the client sends and sendOn delivers it, replies and sendBack do the same
// for the server. When one side ends, the other ends after all frames in transit have arrived. So a request is executed even if its client
// has gone.

// reset closes a connection so that the other end gets an error, not an end of file.
func reset(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = c.Close()
}

// close ends both connections.
func (l *link) close(abruptly bool) {
	l.closing.Do(func() {
		close(l.end)
		if abruptly {
			reset(l.client)
		} else {
			_ = l.client.Close()
		}
		_ = l.server.Close()
	})
}

// leave closes the link and removes it from the proxy.
func (l *link) leave() {
	l.close(false)
	l.mu.Lock()
	waiting := 0
	for _, f := range l.pending {
		if f != ordinary && f != spare {
			waiting++
		}
	}
	l.pending, l.gone = nil, true
	l.mu.Unlock()
	p := l.proxy
	p.mu.Lock()
	defer p.mu.Unlock()
	p.outstanding -= waiting
	delete(p.links, l)
	p.changed.Broadcast()
}

// requests reads the requests of the client.
func (l *link) requests() {
	defer close(l.toServer)
	for in := bufio.NewReader(l.client); ; {
		data, args, err := readRequest(in)
		if err != nil {
			return
		}
		fault := l.proxy.ask(data, args)
		if fault == CutBefore {
			l.proxy.answered()
			l.close(true)
			return
		}
		sendings := []Fault{fault}
		if fault == Twice {
			sendings = append(sendings, spare)
		}
		l.mu.Lock()
		gone := l.gone
		l.pending = append(l.pending, sendings...)
		l.mu.Unlock()
		if gone {
			if fault != ordinary {
				l.proxy.answered()
			}
			return
		}
		for range sendings {
			if !l.queue(l.toServer, frame{data: data}) {
				return
			}
		}
	}
}

// ask counts a request and returns its fault.
func (p *Proxy) ask(data []byte, args []string) Fault {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.match == "" || !bytes.Contains(data, []byte(p.match)) {
		return ordinary
	}
	p.seen++
	p.outstanding++
	p.most = max(p.most, p.outstanding)
	fault := None
	if p.fault != nil {
		fault = p.fault(p.seen, args)
	}
	if fault != None {
		p.bit++
	}
	return fault
}

// answered counts a matching request as no longer outstanding.
func (p *Proxy) answered() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.outstanding--
}

// replies reads the replies of the server.
func (l *link) replies() {
	defer close(l.toClient)
	for in := bufio.NewReader(l.server); ; {
		data, err := readReply(in, nil)
		if err != nil {
			return
		}
		fault := ordinary
		l.mu.Lock()
		if data[0] != '>' && len(l.pending) > 0 { // pushes are not replies
			fault, l.pending = l.pending[0], l.pending[1:]
		}
		l.mute = l.mute || fault == LoseReply
		drop := l.mute || fault == spare
		l.mu.Unlock()
		if fault != ordinary && fault != spare {
			l.proxy.answered()
		}
		if !drop && !l.queue(l.toClient, frame{data: data, cut: fault == CutAfter}) {
			return
		}
	}
}

// queue queues a frame for sending. It reports false if the link has ended.
func (l *link) queue(way chan<- frame, f frame) bool {
	f.due = l.proxy.arrives(len(f.data))
	select {
	case way <- f:
		return true
	case <-l.end:
		return false
	}
}

// arrives returns when bytes that are sent now arrive.
func (p *Proxy) arrives(bytes int) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	at := time.Now()
	if p.speed > 0 {
		if p.clear.Before(at) {
			p.clear = at
		}
		p.clear = p.clear.Add(time.Duration(float64(bytes) / p.speed * float64(time.Second)))
		at = p.clear
	}
	at = at.Add(p.delay)
	if p.jitter > 0 {
		at = at.Add(time.Duration(p.random.Int64N(int64(2*p.jitter))) - p.jitter)
	}
	return at
}

func (l *link) sendOn() {
	l.send(l.server, l.toServer)
	_ = l.server.(*net.TCPConn).CloseWrite()
}

func (l *link) sendBack() {
	l.send(l.client, l.toClient)
	l.leave()
}

// send delivers frames, each when it is due and the network is up. Frames that cannot be written are dropped.
func (l *link) send(to net.Conn, way <-chan frame) {
	for f := range way {
		timer := time.NewTimer(time.Until(f.due))
		select {
		case <-timer.C:
		case <-l.end:
		}
		timer.Stop()
		if l.pass() && f.cut {
			l.close(false) // a reset would discard data that the client has not read yet
		} else {
			_, _ = to.Write(f.data)
		}
	}
	l.pass() // the end of the connection is delayed too
}

// pass waits until the network is up, and reports false if the link has ended.
func (l *link) pass() bool {
	p := l.proxy
	p.mu.Lock()
	defer p.mu.Unlock()
	for {
		select {
		case <-l.end:
			return false
		default:
		}
		if p.network == Up {
			return true
		}
		p.changed.Wait()
	}
}

// errProtocol means that a frame could not be parsed.
var errProtocol = errors.New("redistest: not the Redis protocol")

// readRequest reads a command as clients send it: an array of bulk strings.
func readRequest(in *bufio.Reader) (data []byte, args []string, err error) {
	data, n, err := readHead(in, nil)
	if err != nil || data[0] != '*' || n < 1 {
		return nil, nil, errors.Join(err, errProtocol)
	}
	for range n {
		begin := len(data)
		length := 0
		if data, length, err = readHead(in, data); err != nil || data[begin] != '$' || length < 0 {
			return nil, nil, errors.Join(err, errProtocol)
		}
		begin = len(data)
		if data, err = readBytes(in, data, length+2); err != nil {
			return nil, nil, err
		}
		args = append(args, string(data[begin:begin+length]))
	}
	return data, args, nil
}

// readReply reads one value of RESP2 or RESP3 with its elements, and appends it to data.
func readReply(in *bufio.Reader, data []byte) ([]byte, error) {
	begin := len(data)
	data, n, err := readHead(in, data)
	if err != nil {
		return nil, err
	}
	switch data[begin] {
	case '$', '=', '!':
		if n < 0 {
			return data, nil
		}
		return readBytes(in, data, n+2)
	case '%':
		n *= 2
	case '*', '~', '>':
	default: // simple values are one line
		return data, nil
	}
	for range max(0, n) {
		if data, err = readReply(in, data); err != nil {
			return nil, err
		}
	}
	return data, nil
}

// readHead reads the first line of a frame, appends it to data, and returns its number if its type has one.
func readHead(in *bufio.Reader, data []byte) (all []byte, n int, err error) {
	line, err := in.ReadBytes('\n')
	if err != nil {
		return nil, 0, err
	}
	if len(line) < 3 {
		return nil, 0, errProtocol
	}
	if bytes.IndexByte([]byte("*$%~>=!"), line[0]) >= 0 {
		if n, err = strconv.Atoi(string(line[1 : len(line)-2])); err != nil {
			return nil, 0, errProtocol
		}
	}
	return append(data, line...), n, nil
}

func readBytes(in *bufio.Reader, data []byte, n int) ([]byte, error) {
	begin := len(data)
	data = append(data, make([]byte, n)...)
	_, err := io.ReadFull(in, data[begin:])
	return data, err
}

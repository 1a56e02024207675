package gateway

import (
	"bufio"
	"errors"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// outgoing is the response of a call. Each write waits for the client no longer than pace allows; then it fails, and the call ends. The same
// holds for upgraded connections.
type outgoing struct {
	http.ResponseWriter
	connection *http.ResponseController
	pace       pace
	body       time.Duration // how long the server may wait for the rest of the request body before it writes; 0 without a body
	silence    time.Duration // how long an upgraded connection may be idle; no limit if 0
	slow       *atomic.Int64 // number of clients that read their response too slowly
	counted    bool          // this call is counted in slow
	hijacked   bool          // the connection no longer belongs to the server
	inbound    bool          // the middleware has added its fields to the header
	announced  http.Header   // these, once a 1xx response was sent; nil before
}

// announcements are the fields of the middleware.
var announcements = [...]string{"Ratelimit", "Ratelimit-Policy"}

// setAside takes the fields of the middleware, which come first, out of the header of a 1xx response: ReverseProxy clears it afterwards.
func (w *outgoing) setAside() {
	if !w.inbound || w.announced != nil {
		return
	}
	w.announced = http.Header{}
	h := w.Header()
	for _, name := range announcements {
		if all := h[name]; len(all) > 0 {
			w.announced[name] = all[:1:1]
			if h[name] = all[1:]; len(all) == 1 {
				delete(h, name)
			}
		}
	}
}

// Unwrap is for http.ResponseController.
func (w *outgoing) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// allow sets the write deadline for n bytes.
func (w *outgoing) allow(n int) {
	if d, limited := w.pace.left(n); limited {
		_ = w.connection.SetWriteDeadline(time.Now().Add(d + w.body)) // fails only in tests
	}
}

// WriteHeader implements http.ResponseWriter.
func (w *outgoing) WriteHeader(status int) {
	if status < 200 && status != http.StatusSwitchingProtocols { // ReverseProxy copies all fields of the upstream's 1xx responses
		dropHopByHop(w.Header())
		w.setAside()
	}
	if status >= 200 {
		for name, own := range w.announced {
			w.Header()[name] = append(own, w.Header()[name]...)
		}
		w.announced = nil
	}
	w.allow(0)
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *outgoing) Write(b []byte) (int, error) {
	w.allow(len(b))
	began := time.Now()
	n, err := w.ResponseWriter.Write(b)
	w.pace.note(n, time.Since(began))
	w.count(err)
	return n, err
}

// FlushError is for http.ResponseController.
func (w *outgoing) FlushError() error {
	w.allow(0)
	began := time.Now()
	err := w.connection.Flush()
	w.pace.note(0, time.Since(began))
	w.count(err)
	return err
}

func (w *outgoing) count(err error) {
	if !w.counted && errors.Is(err, os.ErrDeadlineExceeded) {
		w.counted = true
		w.slow.Add(1)
	}
}

// Hijack implements http.Hijacker.
func (w *outgoing) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, buffered, err := w.connection.Hijack()
	if err != nil {
		return nil, nil, err
	}
	w.hijacked = true
	u := &upgraded{Conn: conn, silence: w.silence, pace: w.pace}
	u.extendSilence()
	if d, limited := u.pace.left(0); limited { // for the 101 response
		_ = conn.SetWriteDeadline(time.Now().Add(d))
	}
	return u, buffered, nil
}

// leave sets the write deadline for the bytes that the server writes after the call is over.
func (w *outgoing) leave() { w.allow(0) }

// upgraded is an upgraded connection of a client. It fails if no byte has moved in either direction for silence, or if the client reads more
// slowly than pace allows.
type upgraded struct {
	net.Conn
	silence time.Duration // no limit if 0
	half    atomic.Bool   // the direction to the client is closed

	writing sync.Mutex // held during each write; guards pace
	pace    pace
}

// extendSilence moves the read deadline to silence from now.
func (u *upgraded) extendSilence() {
	silence := u.silence
	if u.half.Load() && (silence == 0 || silence > httplimit.HalfClosed) {
		silence = httplimit.HalfClosed
	}
	if silence > 0 {
		_ = u.SetReadDeadline(time.Now().Add(silence))
	}
}

// Read implements io.Reader.
func (u *upgraded) Read(b []byte) (int, error) {
	n, err := u.Conn.Read(b)
	if err == nil {
		u.extendSilence()
	}
	return n, err
}

// CloseWrite closes the direction to the client. The other direction stays open while bytes move.
func (u *upgraded) CloseWrite() error {
	u.half.Store(true)
	u.extendSilence()
	if c, ok := u.Conn.(interface{ CloseWrite() error }); ok {
		return c.CloseWrite()
	}
	return u.Close()
}

// Write implements io.Writer.
func (u *upgraded) Write(b []byte) (int, error) {
	u.writing.Lock()
	defer u.writing.Unlock()
	if d, limited := u.pace.left(len(b)); limited {
		_ = u.SetWriteDeadline(time.Now().Add(d))
	}
	began := time.Now()
	n, err := u.Conn.Write(b)
	u.pace.note(n, time.Since(began))
	if err == nil {
		u.extendSilence()
	}
	return n, err
}

package gateway

import (
	"errors"
	"io"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// incoming is the request body of a call. Every wait for the client's next bytes is bounded by pace: reads by the handler, and the server's
// own read to the end of the body before it responds. At the end of the body the server clears the deadline itself.
type incoming struct {
	io.ReadCloser
	connection *http.ResponseController
	failures   *atomic.Int64

	reading sync.Mutex // held during each read; guards pace and ended
	pace    pace
	began   bool // Read was called
	ended   bool // Read has returned io.EOF

	closed atomic.Bool // for the transport

	mu     sync.Mutex
	left   bool // the call is over; the connection belongs to the server again
	status int  // response status for a body that could not be read; 0 if there was no such error
}

// Read implements io.Reader.
func (b *incoming) Read(p []byte) (int, error) {
	b.reading.Lock()
	defer b.reading.Unlock()
	if b.closed.Load() {
		return 0, http.ErrBodyReadAfterClose
	}
	if b.began = true; b.ended { // the transport reads again at the end; the server may have closed the body by then, and that error would end the response
		return 0, io.EOF
	}
	b.allow()
	began := time.Now()
	n, err := b.ReadCloser.Read(p)
	b.pace.note(n, time.Since(began))
	if b.ended = err == io.EOF; !b.ended && err != nil {
		b.note(err)
	}
	return n, err
}

// Close ends the reads of the transport. The server closes the body itself, once the rest is discarded.
func (b *incoming) Close() error {
	b.closed.Store(true)
	return nil
}

// Bounds of what is read of a body that nobody needs.
const (
	netHTTPDiscards = 256 << 10 // net/http does so by itself
	mostUnread      = 16 << 20
	longestUnread   = 10 * time.Second
)

// discard sends the response, and reads the rest of a body that was not sent to an upstream. If the connection was closed with unread bytes, a
// client that sends its whole request before it reads would see a reset instead of the response. A client that waits for 100 (Continue) is not
// asked for its body.
func (b *incoming) discard(r *http.Request, response *outgoing) {
	b.reading.Lock()
	defer b.reading.Unlock()
	if b.ended || b.status != 0 || !b.began && r.Header.Get("Expect") != "" || r.ContentLength >= 0 && r.ContentLength < netHTTPDiscards || response.hijacked {
		return
	}
	if response.FlushError() != nil {
		return
	}
	_ = b.connection.SetReadDeadline(time.Now().Add(longestUnread))
	_, _ = io.CopyN(io.Discard, b.ReadCloser, mostUnread)
}

// allow sets the read deadline for the client's next bytes. b.reading must be held once reads have begun.
func (b *incoming) allow() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if d, limited := b.pace.left(0); limited && !b.left {
		_ = b.connection.SetReadDeadline(time.Now().Add(d)) // fails only in tests
	}
}

// note records the first read error as a response status.
func (b *incoming) note(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left || b.status != 0 || errors.Is(err, http.ErrBodyReadAfterClose) { // the gateway closed the body because the upstream failed
		return
	}
	b.failures.Add(1)
	if b.status = http.StatusBadRequest; errors.Is(err, os.ErrDeadlineExceeded) {
		b.status = http.StatusRequestTimeout
	}
}

// leave marks the call as over: no deadline is set and no error is recorded after it.
func (b *incoming) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left = true
}

// failureStatus returns the response status for a body that could not be read, or 0 if there was no read error. contextErr is the error of
// the call's context: a failing read cancels the context before it returns, so failureStatus waits for a read in flight.
func (b *incoming) failureStatus(contextErr error) (status int) {
	if b == nil {
		return 0
	}
	if contextErr != nil {
		b.reading.Lock()
		defer b.reading.Unlock()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.status
}

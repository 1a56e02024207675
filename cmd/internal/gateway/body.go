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

// incoming is the body of a call. Whoever waits for what the client sends next of it waits for so long at most: who reads it, and the
// server, which looks for its end before it answers. At its end the server ends the limit itself.
type incoming struct {
	io.ReadCloser
	patience   time.Duration // 0: for ever
	connection *http.ResponseController
	failures   *atomic.Int64

	reading sync.Mutex // held while it is read
	ended   bool       // its end was read

	mu     sync.Mutex
	left   bool // the call is over, and the connection the server's
	status int  // of the answer, since it could not be read; 0: it could
}

// Read implements io.Reader. Bytes that come begin the patience anew.
func (b *incoming) Read(p []byte) (int, error) {
	b.reading.Lock()
	defer b.reading.Unlock()
	if b.ended { // a transport looks twice, and meanwhile the server may have closed it, which would end the response
		return 0, io.EOF
	}
	b.allow()
	n, err := b.ReadCloser.Read(p)
	if b.ended = err == io.EOF; !b.ended && err != nil {
		b.note(err)
	}
	return n, err
}

// allow gives the client time.
func (b *incoming) allow() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.patience > 0 && !b.left {
		_ = b.connection.SetReadDeadline(time.Now().Add(b.patience)) // it can, but in tests
	}
}

// note says why it cannot be read.
func (b *incoming) note(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.left || b.status != 0 || errors.Is(err, http.ErrBodyReadAfterClose) { // closed by us, since the upstream has failed
		return
	}
	b.failures.Add(1)
	if b.status = http.StatusBadRequest; errors.Is(err, os.ErrDeadlineExceeded) {
		b.status = http.StatusRequestTimeout
	}
}

// leave ends the call.
func (b *incoming) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left = true
}

// spoiled is how a call is answered whose body could not be read; 0: it could. A read that fails ends the call's context before it
// returns: then it is waited for.
func (b *incoming) spoiled(context error) (status int) {
	if b == nil {
		return 0
	}
	if context != nil {
		b.reading.Lock()
		defer b.reading.Unlock()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.status
}

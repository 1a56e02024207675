package httplimit

import (
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

// endAfter makes the call end with the response's body: when it is read to its end, fails or is closed. A response without a body
// has ended.
func (c *call) endAfter(response *http.Response) {
	if !c.watch.Started() && !c.admission.Holds() {
		return
	}
	body := &held{response.Body, c}
	switch stream, ok := response.Body.(io.ReadWriteCloser); {
	case response.Body == nil || response.Body == http.NoBody:
		c.end()
	case ok: // an upgraded connection, to which the caller writes
		response.Body = &heldStream{held: body, stream: stream}
	default:
		response.Body = body
	}
}

// held is a response body that ends its call.
type held struct {
	io.ReadCloser
	call *call
}

func (b *held) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.call.end()
	}
	return n, err
}

func (b *held) Close() error {
	defer b.call.end()
	return b.ReadCloser.Close()
}

// HalfClosed is how long an upgraded stream lasts after one direction has ended, without a byte in the other.
const HalfClosed = time.Minute

// heldStream is an upgraded stream that ends its call when both directions have ended, when it is closed or fails, or when one direction has
// ended and nothing has moved in the other for HalfClosed. Then it is closed, so that nobody waits for the other side.
type heldStream struct {
	*held
	stream io.ReadWriteCloser

	mu              sync.Mutex
	received, wrote bool        // the direction has ended
	silence         *time.Timer // closes the stream; nil while both directions are open
}

// Read implements io.Reader.
func (s *heldStream) Read(p []byte) (int, error) {
	n, err := s.stream.Read(p)
	switch {
	case err == io.EOF:
		s.ended(&s.received)
	case err != nil:
		s.call.end()
	default:
		s.moved()
	}
	return n, err
}

// Write implements io.Writer.
func (s *heldStream) Write(p []byte) (int, error) {
	n, err := s.stream.Write(p)
	s.moved()
	return n, err
}

// moved notes that bytes have moved.
func (s *heldStream) moved() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.silence != nil {
		s.silence.Reset(HalfClosed)
	}
}

// ended notes that a direction has ended.
func (s *heldStream) ended(direction *bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	*direction = true
	switch {
	case s.received && s.wrote:
		s.call.end()
	case s.silence == nil:
		s.silence = time.AfterFunc(HalfClosed, func() { _ = s.held.Close() })
	}
}

// Close implements io.Closer.
func (s *heldStream) Close() error {
	s.mu.Lock()
	if s.silence != nil {
		s.silence.Stop()
	}
	s.mu.Unlock()
	return s.held.Close()
}

// CloseWrite closes the direction to the upstream. The other direction stays open while bytes move.
func (s *heldStream) CloseWrite() error {
	half, ok := s.stream.(interface{ CloseWrite() error })
	if !ok {
		return errors.ErrUnsupported
	}
	s.ended(&s.wrote)
	return half.CloseWrite()
}

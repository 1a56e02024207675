package httplimit

import (
	"errors"
	"io"
	"net/http"
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
		response.Body = &heldStream{body, stream}
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

type heldStream struct {
	*held
	io.Writer
}

// CloseWrite closes the direction to the upstream. The other direction stays open.
func (s *heldStream) CloseWrite() error {
	if half, ok := s.Writer.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

package httplimit

import (
	"io"
	"net/http"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// leaveAfter makes the admission end with the response's body: when it is read to its end, fails or is closed. A response
// without a body has ended.
func leaveAfter(response *http.Response, a *gate.Admission) {
	if !a.Holds() {
		return
	}
	body := &held{response.Body, a}
	switch stream, ok := response.Body.(io.ReadWriteCloser); {
	case response.Body == nil || response.Body == http.NoBody:
		a.Leave()
	case ok: // an upgraded connection, to which the caller writes
		response.Body = &heldStream{body, stream}
	default:
		response.Body = body
	}
}

// held is a response body that ends its admission.
type held struct {
	io.ReadCloser
	admission *gate.Admission
}

func (b *held) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.admission.Leave()
	}
	return n, err
}

func (b *held) Close() error {
	defer b.admission.Leave()
	return b.ReadCloser.Close()
}

type heldStream struct {
	*held
	io.Writer
}

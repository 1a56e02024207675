package httplimit

import (
	"io"
	"net/http"

	"github.com/go-tokenbucket/tokenbucket/gate"
)

// leaveAfter leaves when the body of a response has been read or closed. A response without a body has ended.
func leaveAfter(response *http.Response, a *gate.Admission) {
	if !a.Holds() {
		return
	}
	body := &held{response.Body, a}
	switch stream, ok := response.Body.(io.ReadWriteCloser); {
	case response.Body == nil || response.Body == http.NoBody:
		a.Leave()
	case ok: // of an upgrade: the caller writes to it
		response.Body = &heldStream{body, stream}
	default:
		response.Body = body
	}
}

// held is the body of a response whose call holds something.
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

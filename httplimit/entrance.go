package httplimit

import (
	"context"
	"io"
	"net/http"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/gate"
)

// Entrance is a Gate that may hold something for a call until it has ended: a place among those that are under way at once. A
// *registry.Registry is one. Transport and the middleware ask Admit, rather than Reserve, of a gate that has it.
type Entrance interface {
	Gate
	// Admit is Reserve for a call that may hold something until it has ended. leave gives that back; it is nil if there is nothing to give
	// back, if the call is refused, and with an error. Admit may wait, as long as the key's configuration allows.
	Admit(ctx context.Context, key string) (permit *tokenbucket.Reservation, leave func(), err error)
}

// leaveAfter gives a place back when the body of a response has been read or closed. A response that has none has ended.
func leaveAfter(response *http.Response, place *gate.Place) {
	if place == nil {
		return
	}
	body := &held{response.Body, place}
	switch stream, ok := response.Body.(io.ReadWriteCloser); {
	case response.Body == nil || response.Body == http.NoBody:
		place.Leave()
	case ok: // of an upgrade, which whoever upgraded writes to
		response.Body = &heldStream{body, stream}
	default:
		response.Body = body
	}
}

// held is the body of a response whose call holds something.
type held struct {
	io.ReadCloser
	place *gate.Place
}

func (b *held) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.place.Leave()
	}
	return n, err
}

func (b *held) Close() error {
	defer b.place.Leave()
	return b.ReadCloser.Close()
}

type heldStream struct {
	*held
	io.Writer
}

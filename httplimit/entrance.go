package httplimit

import (
	"context"
	"io"
	"net/http"
	"sync"

	"github.com/go-tokenbucket/tokenbucket"
)

// Entrance is a Gate that may hold something for a call until it has ended: a place among those that are under way at once. A
// *registry.Registry is one. Transport and the middleware ask Admit, rather than Reserve, of a gate that has it.
type Entrance interface {
	Gate
	// Admit is Reserve for a call that may hold something until it has ended. leave gives that back; it is nil if there is nothing to give
	// back, if the call is refused, and with an error. Admit may wait, as long as the key's configuration allows.
	Admit(ctx context.Context, key string) (permit *tokenbucket.Reservation, leave func(), err error)
}

// ask asks the gate.
func ask(ctx context.Context, gate Gate, key string) (permit *tokenbucket.Reservation, l *leaving, err error) {
	e, ok := gate.(Entrance)
	if !ok {
		permit, err = gate.Reserve(ctx, key)
		return permit, nil, err
	}
	permit, end, err := e.Admit(ctx, key)
	switch {
	case end == nil:
	case err == nil && permit != nil && permit.OK():
		l = &leaving{end: end}
	default: // the call does not begin
		end()
	}
	return permit, l, err
}

// leaving is what a call has to do when it has ended; nil: nothing.
type leaving struct {
	end  func()
	once sync.Once
}

func (l *leaving) leave() {
	if l != nil {
		l.once.Do(l.end)
	}
}

// after leaves when the body of a response has been read or closed. A response that has none has ended.
func (l *leaving) after(response *http.Response) {
	if l == nil {
		return
	}
	body := &held{response.Body, l}
	switch stream, ok := response.Body.(io.ReadWriteCloser); {
	case response.Body == nil || response.Body == http.NoBody:
		l.leave()
	case ok: // of an upgrade, which whoever upgraded writes to
		response.Body = &heldStream{body, stream}
	default:
		response.Body = body
	}
}

// held is the body of a response whose call holds something.
type held struct {
	io.ReadCloser
	leaving *leaving
}

func (b *held) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil {
		b.leaving.leave()
	}
	return n, err
}

func (b *held) Close() error {
	defer b.leaving.leave()
	return b.ReadCloser.Close()
}

type heldStream struct {
	*held
	io.Writer
}

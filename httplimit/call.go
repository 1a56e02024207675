package httplimit

import (
	"context"
	"net/http"

	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/internal/tries"
)

// call is a request that a Transport sends, with all its tries. The base makes one try after the other.
type call struct {
	transport *Transport
	original  *http.Request // with its priority
	request   *http.Request // as the base gets it
	key       string
	watch     tries.Watch     // not started if the base cannot repeat the request
	admission *gate.Admission // of the last try
}

func (t *Transport) newCall(r *http.Request, key string, a *gate.Admission) *call {
	c := &call{transport: t, original: r, key: key, admission: a}
	ctx := gate.NewContext(r.Context(), a)
	if tries.Repeatable(r) {
		c.watch.Start(ctx, r.URL, c)
		ctx = &c.watch
	}
	c.request = r.WithContext(ctx)
	return c
}

// Again implements tries.Call. It asks for the permit of a further try. The one before has ended, so it leaves first: with a concurrency of
// one it would be in the way.
func (c *call) Again() error {
	c.admission.Leave()
	a, err := c.transport.enter(c.original, c.key)
	c.admission = a
	return err
}

// failure returns the error of a call whose base failed with err.
func (c *call) failure(err error) error {
	if c.watch.Failed() == nil {
		return err
	}
	if c.original.Context().Err() != nil {
		return c.watch.Failed()
	}
	return &RepeatError{c.watch.Failed()}
}

// answered returns the admission of the try that got the response. The context of the response's Request has it too, and does not end with
// the call, so that a caller can settle its cost.
func (c *call) answered(response *http.Response) *gate.Admission {
	if r := response.Request; r != nil && c.watch.Started() {
		response.Request = r.WithContext(gate.NewContext(context.WithoutCancel(c.original.Context()), c.admission))
	}
	return c.admission
}

// end ends the call. It may be called again, and concurrently.
func (c *call) end() {
	c.admission.Leave()
	if c.watch.Started() {
		c.watch.End()
	}
}

// WithoutCancel is for the base of a [Transport] that lets calls outlive their callers. It returns a context that does not end with its parent, as
// that of [context.WithoutCancel]. It ends when cancel is called, and when net/http would send the request again without a permit: see
// [RepeatError]. The parent must be the request's context, or derive from it.
func WithoutCancel(parent context.Context) (ctx context.Context, cancel context.CancelFunc) {
	return tries.WithoutCancel(parent)
}

package registry

import "context"

// tentative is a grant of a row's rate that another bound of the row may still refuse.
type tentative struct {
	count func() // counts it; nil: no rate has granted it yet
}

type tentativeKey struct{}

// under returns a context in which Tentative keeps the grant.
func (t *tentative) under(ctx context.Context) context.Context {
	return context.WithValue(ctx, tentativeKey{}, t)
}

// admitted counts the grant: the whole row has agreed.
func (t *tentative) admitted() {
	if t.count != nil {
		t.count()
	}
}

// Tentative is for observers of decisions that count calls (tokenbucket.Observer): it reports whether the grant of ctx's call is one that
// the row's window or concurrency may still refuse. Then count is called once the whole row has agreed, by the caller's goroutine, and
// not at all if it has not: that refusal goes to the hook of [WithBypassHook].
func Tentative(ctx context.Context, count func()) bool {
	t, ok := ctx.Value(tentativeKey{}).(*tentative)
	if ok {
		t.count = count
	}
	return ok
}

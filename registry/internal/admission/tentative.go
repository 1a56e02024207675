package admission

import "context"

// tentative is a grant of a row's rate that the row's concurrency or window may still refuse.
type tentative struct {
	count func() // counts the grant; nil if the rate has not granted the call
}

type tentativeKey struct{}

// under returns a context in which Tentative finds t.
func (t *tentative) under(ctx context.Context) context.Context {
	return context.WithValue(ctx, tentativeKey{}, t)
}

// admitted counts the grant, once all limits of the row have granted the call.
func (t *tentative) admitted() {
	if t.count != nil {
		t.count()
	}
}

// Tentative implements registry.Tentative.
func Tentative(ctx context.Context, count func()) bool {
	t, ok := ctx.Value(tentativeKey{}).(*tentative)
	if ok {
		t.count = count
	}
	return ok
}

package registry

import (
	"context"

	"github.com/go-tokenbucket/tokenbucket/registry/internal/admission"
)

// Tentative is for a tokenbucket.Observer that counts calls. It reports whether the row's window or concurrency may still refuse the call
// of ctx, which the rate has granted. If so, the Registry calls count from the caller's goroutine once all limits have granted the call.
// It does not call count for a call that is refused: that refusal goes to the hook of [WithBypassHook].
func Tentative(ctx context.Context, count func()) bool { return admission.Tentative(ctx, count) }

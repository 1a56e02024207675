package gateway

import (
	"context"
	"log/slog"
	"net/http"
	"time"

	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// counter is a gate that counts the calls and the penalties that go through it.
type counter struct {
	gate.Gate
	log     *slog.Logger
	metrics *metrics
	logged  logLimiter
	callers func() bool // whether keys name callers
}

// Enter implements gate.Gate. Only the first try of a call is counted in the admissions.
func (c *counter) Enter(ctx context.Context, key string) (*gate.Admission, error) {
	call, _ := ctx.Value(callKey{}).(*call)
	count := c.metrics.admitted
	if call != nil && call.admission != nil {
		count = c.metrics.repeated
	}
	a, err := c.Gate.Enter(ctx, key)
	switch {
	case err == nil:
		count(key, a.By.String(), resultOf(a.OK))
		if call != nil {
			if release := a.Release; release != nil {
				a.Release = func() { call.leaveAfterUpstream(release) }
			}
			call.admission = a
		}
	case ctx.Err() != nil: // the client left while its call waited
		count(key, "none", cancelledCall)
	default:
		count(key, "none", failedCall)
	}
	return a, err
}

// repeats is the gate of the calls to upstreams with --inbound. The middleware has entered the gate for the first try of a call, so only
// further ones do.
type repeats struct{ gate.Gate }

// Enter implements gate.Gate.
func (g repeats) Enter(ctx context.Context, key string) (*gate.Admission, error) {
	call := ctx.Value(callKey{}).(*call)
	if !call.sent {
		call.sent = true
		return &gate.Admission{OK: true}, nil
	}
	call.admission.Leave() // of the try that has failed
	return g.Gate.Enter(ctx, key)
}

// Penalizes implements httplimit.PenaltyPolicy. By default a 503 penalizes any bucket, and a 429 only the bucket of a single caller: an upstream
// may mean that caller alone.
func (c *counter) Penalizes(key string, status int) bool {
	rows, ok := c.Gate.(interface {
		Penalty(name string) (p registry.Penalty, own bool)
	})
	if !ok {
		return true
	}
	p, own := rows.Penalty(key)
	return p.Covers(status, status == http.StatusServiceUnavailable || own && c.callers())
}

var _ httplimit.PenaltyPolicy = (*counter)(nil)

// Penalize implements gate.Gate.
func (c *counter) Penalize(ctx context.Context, key string, d time.Duration) error {
	err := c.Gate.Penalize(ctx, key, d)
	if err != nil || !c.metrics.limited(key) {
		return err
	}
	until := time.Now().Add(d)
	c.metrics.penalized(key, until)
	if n, ok := c.logged.note(c.metrics.label(key)); ok { // by label, since clients can invent any number of keys
		c.log.Info("an upstream's Retry-After penalizes a bucket, so the fleet sends no call of it until then", "key", key, "retryAfter", d, "until", until, "times", n)
	}
	return nil
}

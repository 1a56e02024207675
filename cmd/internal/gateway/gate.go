package gateway

import (
	"context"
	"log/slog"
	"time"

	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// gate tells of the penalties that go through it.
type gate struct {
	httplimit.Gate
	log     *slog.Logger
	metrics *metrics
	told    seldom
}

// Penalize implements httplimit.Gate.
func (g *gate) Penalize(ctx context.Context, key string, d time.Duration) error {
	err := g.Gate.Penalize(ctx, key, d)
	if err != nil || !g.metrics.limited(key) {
		return err
	}
	until := time.Now().Add(d)
	g.metrics.penalized(key, until)
	if n, tell := g.told.note(g.metrics.label(key)); tell { // keys without a row are as many as clients like
		g.log.Info("an upstream's Retry-After holds a bucket back", "key", key, "retryAfter", d, "until", until, "times", n)
	}
	return nil
}

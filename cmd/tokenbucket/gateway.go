package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
)

// gateway is one instance of the fleet. It shares only the bucket with the others.
type gateway struct {
	limiter *tokenbucket.RateLimiter
	client  *http.Client
	url     string
	calls   *tally
}

// fleet is all gateways, with the records of their calls and permits.
type fleet struct {
	gateways []*gateway
	ledgers  []*ledger
	calls    *tally
}

func (d *demo) startFleet(b *backend, up *upstream) (*fleet, error) {
	f := &fleet{calls: &tally{origin: d.origin}}
	for range d.instances {
		l := &ledger{Store: b.newStore(), origin: d.origin}
		limiter, err := d.newLimiter(d.options, l)
		if err != nil {
			return nil, err
		}
		f.ledgers = append(f.ledgers, l)
		f.gateways = append(f.gateways, &gateway{limiter: limiter, client: newClient(), url: up.url, calls: f.calls})
	}
	return f, nil
}

func newClient() *http.Client {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.Proxy = nil // the upstream is on this machine
	t.MaxIdleConnsPerHost = 64
	return &http.Client{Transport: t, Timeout: 5 * time.Second}
}

func (f *fleet) close() {
	for _, g := range f.gateways {
		g.client.CloseIdleConnections()
	}
}

// permits returns all permits taken, and how often permits were refunded.
func (f *fleet) permits() (all []permit, back int) {
	for _, l := range f.ledgers {
		l.mu.Lock() // a failed call may have left a request in flight
		all = append(all, l.permits...)
		back += l.back
		l.mu.Unlock()
	}
	return all, back
}

// offer makes calls at random times until ctx ends, on average perSecond of them. It returns when all calls have ended.
func (g *gateway) offer(ctx context.Context, perSecond float64) {
	var calls sync.WaitGroup
	defer calls.Wait()
	last := context.WithoutCancel(ctx) // waiting calls are not cancelled
	for next := time.Now(); ; {
		next = next.Add(time.Duration(rand.ExpFloat64() / perSecond * float64(time.Second)))
		if !sleepUntil(ctx, next) {
			return
		}
		calls.Go(func() { g.call(last) })
	}
}

func sleepUntil(ctx context.Context, t time.Time) bool {
	timer := time.NewTimer(time.Until(t))
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err() == nil
	case <-ctx.Done():
		return false
	}
}

// call asks the limiter for a permit, and forwards the call if it gets one.
func (g *gateway) call(ctx context.Context) {
	c := g.calls.begin()
	ok, err := g.limiter.Try(ctx)
	switch {
	case err != nil:
		g.calls.end(c, failed, err)
	case !ok:
		g.calls.end(c, refused, nil)
	default:
		g.calls.end(c, passed, nil)
		if err := g.forward(ctx); err != nil {
			g.calls.lose(err)
		}
	}
}

func (g *gateway) forward(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, g.url, nil)
	if err != nil {
		return err
	}
	resp, err := g.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		return fmt.Errorf("upstream answered %s", resp.Status)
	}
	return nil
}

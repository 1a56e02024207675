// Package gatetest tests adapters of gates: code that asks a gate.Gate about each call, as httplimit and contrib/grpc do.
package gatetest

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// Holder is a gate whose every admission holds something, even beside a refusal or an error. Its methods may be called concurrently.
type Holder struct {
	// Refuse makes Enter refuse calls, and Err makes it fail.
	Refuse bool
	Err    error

	released atomic.Int64
}

// Enter implements gate.Gate.
func (h *Holder) Enter(context.Context, string) (*gate.Admission, error) {
	return &gate.Admission{OK: !h.Refuse, Release: func() { h.released.Add(1) }}, h.Err
}

// Penalize implements gate.Gate. It does nothing.
func (h *Holder) Penalize(context.Context, string, time.Duration) error { return nil }

// Released returns how many admissions have released what they held.
func (h *Holder) Released() int { return int(h.released.Load()) }

// TestNotLetThrough checks that a call that does not begin holds nothing, whatever the gate returned beside the refusal or the error. call
// makes one call through an adapter of the gate and returns its error; ctx has a deadline.
func TestNotLetThrough(t *testing.T, call func(ctx context.Context, t *testing.T, g gate.Gate) error) {
	for name, h := range map[string]*Holder{
		"failed":   {Err: errors.New("unavailable")},
		"too long": {Err: &tokenbucket.WaitError{Wait: time.Hour, Reason: context.DeadlineExceeded}},
		"refused":  {Refuse: true},
	} {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if err := call(ctx, t, h); err == nil {
				t.Error("the call was let through")
			}
			if n := h.Released(); n != 1 {
				t.Errorf("released %d times: want once", n)
			}
		})
	}
}

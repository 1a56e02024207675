package registry_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
)

func hostileRow(name string, rate float64, change ...func(*registry.Limit)) registry.Limit {
	one := 1.0
	l := registry.Limit{Name: name, Row: name, Rate: rate, Burst: &one, MaxWait: 5 * time.Second}
	for _, f := range change {
		f(&l)
	}
	return l
}

// hostileWaiters begins n calls, which are counted when they pass.
func hostileWaiters(calls *sync.WaitGroup, n int, call func(ctx context.Context) (bool, error)) (passed, ended *atomic.Int64) {
	passed, ended = new(atomic.Int64), new(atomic.Int64)
	for range n {
		calls.Go(func() {
			ok, err := call(ctx)
			if ended.Add(1); ok && err == nil {
				passed.Add(1)
			}
		})
		time.Sleep(time.Millisecond)
	}
	return passed, ended
}

// Names get a row of their own in the same load that changes the row which had them.
func TestHostileNewRowBesideAChangedOne(t *testing.T) {
	for name, c := range map[string]struct {
		before registry.Limit
		change func(*registry.Limit)
	}{
		"rate changes":    {hostileRow("/a/*", 10), func(l *registry.Limit) { l.Rate = 11 }},

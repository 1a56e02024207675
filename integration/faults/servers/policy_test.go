package servers

import (
	"context"
	"errors"
	"fmt"
	"io"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/integration/internal/faultlab"
)

// share is a policy of one of two instances: it takes itself for one of three until it has counted them.
var share = tokenbucket.LocalShare(3)

// Every fault under every policy. An outage is an error with FailClosed, lets all calls pass with FailOpen, and as many as the local share
// allows with LocalShare; a fault that needs a repair is an error with all of them. A shadow beside it lets all pass in either case. Their
// observers receive exactly that. When the server has recovered, the bucket decides again.
func TestPolicies(t *testing.T) {
	for name, f := range faults {
		for _, kind := range faultlab.Kinds {
			for _, policy := range []tokenbucket.FailurePolicy{tokenbucket.FailClosed, tokenbucket.FailOpen, share} {
				t.Run(fmt.Sprint(name, " ", kind, " policy ", policy), func(t *testing.T) {
					t.Parallel()
					obeys(t, f, kind, policy)
				})
			}
		}
	}
}

// outcome is an observer's Decision about a call.
type outcome struct {
	granted, failed, shadow bool
	by                      string
}

// observed counts the calls of one goroutine by their outcomes.
type observed map[outcome]int

func (o observed) option() tokenbucket.Option {
	return tokenbucket.WithObserver(tokenbucket.Observer{Decision: func(_ context.Context, d tokenbucket.Decision) {
		o[outcome{d.Granted, d.Err != nil, d.Shadow, d.By.String()}]++
	}})
}

// obeys takes a limiter with a policy through a fault. Its store timeout is short, because an outage is not noticed earlier than that. But
// a fault that is no outage is an error at once, and must not be mistaken for one if the machine is slow.
func obeys(t *testing.T, f *fault, kind string, policy tokenbucket.FailurePolicy) {
	timeout := 300 * time.Millisecond
	if f.config {
		timeout = patient
	}
	late := faultlab.MeasureLateness(t)
	told, shadowTold := observed{}, observed{}
	b := f.start(t, kind)
	var other *tokenbucket.RateLimiter
	defer func() { runtime.KeepAlive(other) }() // it lives, and shows it
	if policy == share {
		other = b.open(tokenbucket.WithStore(b.store()), tokenbucket.WithFailurePolicy(share))
		b.awaitInstances(t, 1)
	}
	b.limiter = b.open(tokenbucket.WithFailurePolicy(policy), tokenbucket.WithStoreTimeout(timeout), told.option())
	shadow := b.open(tokenbucket.WithShadow(), tokenbucket.WithStoreTimeout(timeout), shadowTold.option())
	if policy == share {
		b.awaitInstances(t, 2)
	}
	const before = 30
	b.warm(t, before)
	f.begin(t, b)
	clear(told)
	const calls = 50
	slowest, passed, first := time.Duration(0), 0, time.Now()
	for range calls {
		ok, err := shadow.TryAcquire(background, 1, 0)
		assert.True(t, ok, "a shadow")
		assert.NoError(t, err)
		began := time.Now()
		ok, err = b.limiter.TryAcquire(background, 1, 0)
		slowest = max(slowest, time.Since(began))
		if ok {
			passed++
		}
		if err != nil && f.config {
			if !errors.Is(err, io.EOF) { // its connection was cut: it cannot know why
				assert.NotErrorIs(t, err, tokenbucket.ErrStoreUnavailable)
			}
			assert.True(t, f.says(err), "%v", err)
		}
	}
	if f.config && f.lost { // the bucket is, and a shadow has its own
		assert.Equal(t, observed{{granted: true, shadow: true, by: "store"}: calls}, shadowTold)
	} else {
		assert.Equal(t, observed{{failed: true, shadow: true, by: "store"}: calls}, shadowTold)
	}
	switch {
	case f.config || policy == tokenbucket.FailClosed:
		assert.Zero(t, passed)
		assert.Equal(t, observed{{failed: true, by: "store"}: calls}, told)
	case policy == tokenbucket.FailOpen:
		assert.Equal(t, calls, passed)
		assert.Equal(t, observed{{granted: true, by: "policy"}: calls}, told)
	default:
		const part = rate / 2.0 // of a bucket that begins empty
		took := time.Since(first)
		t.Logf("%d of %d passed in %v", passed, calls, took)
		assert.LessOrEqual(t, float64(passed), 1+part*took.Seconds())
		want := observed{{by: "policy"}: calls - passed}
		if passed > 0 {
			want[outcome{granted: true, by: "policy"}] = passed
		}
		assert.Equal(t, want, told)
		const more = 4
		began := time.Now()
		for ok := true; ok; { // until it has none
			began = time.Now()
			ok, _ = b.limiter.TryAcquire(background, 1, 0)
		}
		for range more {
			ok, err := b.limiter.TryAcquire(background, 1, time.Second)
			assert.True(t, ok, "%v", err)
		}
		assert.GreaterOrEqual(t, time.Since(began).Seconds(), (more-1)/part, "%d more", more)
	}
	faultlab.Bit(t, before, calls)
	assert.LessOrEqual(t, slowest, min(timeout, storeTimeout)+slack+10*late.Most())
	f.end(t, b)
	well, trips := time.Now(), faultlab.MeasureTrips(t, b.Addr)
	require.Eventually(t, func() bool { // the bucket is asked again, and is another than before
		was := b.seq()
		ok, err := b.limiter.TryAcquire(background, 1, 0)
		return ok && err == nil && b.seq() > was
	}, 20*time.Second, 5*time.Millisecond)
	faultlab.Figure(t, "the bucket is asked again after", time.Since(well))
	assert.LessOrEqual(t, time.Since(well), 3*time.Second+10*max(late.Most(), trips.Most()))
}

// awaitInstances waits until n instances are counted.
func (b *bench) awaitInstances(t *testing.T, n int64) {
	t.Helper()
	require.Eventually(t, func() bool { return b.admin.ZCard(background, "tokenbucket:instances").Val() == n }, 20*time.Second, time.Millisecond)
}

// seq counts the changes of the stored bucket; 0 while there is none.
func (b *bench) seq() int64 {
	var is tokenbucket.PermitBucket
	if text, err := b.admin.Get(background, b.key()).Bytes(); err != nil || is.UnmarshalText(text) != nil {
		return 0
	}
	return is.Seq
}

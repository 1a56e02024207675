package servers

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/faultlab"
)

// share is a policy of one instance: until it has counted itself it takes itself for half of the fleet.
var share = tokenbucket.LocalShare(2)

// Every fault under every policy. An outage is an error with FailClosed, lets all calls pass with FailOpen, and with
// LocalShare as many as this process's part of the rate; what must be set right is an error with all of them. A shadow beside
// it lets all pass, whatever it is. When the server is well, the bucket is asked again.
func TestPolicies(t *testing.T) {
	for name, f := range faults {
		for _, kind := range kinds {
			for _, policy := range []tokenbucket.FailurePolicy{tokenbucket.FailClosed, tokenbucket.FailOpen, share} {
				t.Run(name+" "+kind+" "+policy.String(), func(t *testing.T) {
					t.Parallel()
					obeys(t, f, kind, policy)
				})
			}
		}
	}
}

// obeys has a limiter with a policy live through a fault. Its store timeout is short, since nothing is told of an outage earlier
// than that.
func obeys(t *testing.T, f *fault, kind string, policy tokenbucket.FailurePolicy) {
	const timeout = 300 * time.Millisecond
	late := faultlab.MeasureLateness(t)
	b := f.start(t, kind, tokenbucket.WithFailurePolicy(policy), tokenbucket.WithStoreTimeout(timeout))
	shadow := b.open(tokenbucket.WithShadow(), tokenbucket.WithStoreTimeout(timeout))
	const before = 30
	b.warm(t, before)
	f.begin(t, b)
	const calls = 4
	slowest, passed, first := time.Duration(0), 0, time.Now()
	for range calls {
		ok, err := shadow.TryAcquire(background, 1, 0)
		assert.True(t, ok, "a shadow")
		assert.NoError(t, err)
		began := time.Now()
		ok, err = b.limiter.TryAcquire(background, 1, 0)
		took := time.Since(began)
		switch {
		case f.config || policy == tokenbucket.FailClosed:
			assert.False(t, ok)
			assert.Error(t, err)
		case policy == tokenbucket.FailOpen:
			assert.True(t, ok)
			assert.NoError(t, err)
		default:
			assert.NoError(t, err)
			if ok {
				passed++
			}
		}
		slowest = max(slowest, took)
		if err != nil && f.config {
			assert.NotErrorIs(t, err, tokenbucket.ErrStoreUnavailable)
			assert.True(t, f.says(err), "%v", err)
		}
	}
	if policy == share && !f.config {
		assert.LessOrEqual(t, float64(passed), 1+rate*time.Since(first).Seconds())
		ok, err := b.limiter.TryAcquire(background, 1, time.Second)
		assert.True(t, ok, "%v", err)
	}
	faultlab.Bit(t, before, calls)
	time.Sleep(10 * time.Millisecond) // if the machine was late just now, that is measured by then
	assert.LessOrEqual(t, slowest, timeout+500*time.Millisecond+10*late.Most())
	f.end(t, b)
	well := time.Now()
	require.Eventually(t, func() bool { // the bucket is asked again, and is another than before
		was := b.seq()
		ok, err := b.limiter.TryAcquire(background, 1, 0)
		return ok && err == nil && b.seq() > was
	}, 20*time.Second, 5*time.Millisecond)
	t.Logf("the bucket was asked again %v after the server was well", time.Since(well))
	assert.LessOrEqual(t, time.Since(well), 3*time.Second+10*late.Most())
}

// seq counts the changes of the stored bucket; 0 while there is none.
func (b *bench) seq() int64 {
	var is tokenbucket.PermitBucket
	if text, err := b.admin.Get(background, b.key()).Bytes(); err != nil || is.UnmarshalText(text) != nil {
		return 0
	}
	return is.Seq
}

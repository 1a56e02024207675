package servers

import (
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/faultlab"
)

// An outage of any kind lets calls pass if the policy says FailOpen, and is an error with FailClosed; what must be set right is an
// error with both. When the server is well, both limit again.
func TestPolicies(t *testing.T) {
	for name, f := range faults {
		for _, kind := range kinds {
			for _, policy := range []tokenbucket.FailurePolicy{tokenbucket.FailClosed, tokenbucket.FailOpen} {
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
	const before = 30
	b.warm(t, before)
	f.begin(t, b)
	open := policy == tokenbucket.FailOpen && !f.config
	const calls = 4
	slowest := time.Duration(0)
	for range calls {
		began := time.Now()
		ok, err := b.limiter.TryAcquire(background, 1, 0)
		took := time.Since(began)
		assert.Equal(t, open, ok, "%v", err)
		assert.Equal(t, open, err == nil, "%v", err)
		slowest = max(slowest, took)
		if err != nil && f.config {
			assert.NotErrorIs(t, err, tokenbucket.ErrStoreUnavailable)
			assert.True(t, f.says(err), "%v", err)
		}
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

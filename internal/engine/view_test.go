package engine

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// A late reply prolongs a penalty, and never shortens it: a newer reply may have shown another one. It changes nothing else.
func TestLateReplyOfAPenalty(t *testing.T) {
	var v View
	held := func(until int64) *permit.Outcome {
		return &permit.Outcome{NowMicros: 1000, Bucket: permit.Bucket{Terms: terms(time.Second, 1), HeldUntilMicros: until}}
	}
	f := &flight{limiter: &Limiter{Own: terms(time.Second, 1)}}
	v.update(f, held(5000), 1000, moment{local: 1000, mono: clock.Mono()})
	require.EqualValues(t, 5000, v.heldUntil)
	known := v.terms
	f.late = true
	v.update(f, held(4000), 1000, moment{local: 1000})
	require.EqualValues(t, 5000, v.heldUntil)
	v.update(f, held(7000), 1000, moment{local: 1000})
	require.EqualValues(t, 7000, v.heldUntil)
	require.Same(t, known, v.terms)
	f.late = false
	v.update(f, held(2000), 1000, moment{local: 1000, mono: clock.Mono()})
	require.EqualValues(t, 2000, v.heldUntil)
}

// The view knows the configuration in force as long as that has a version.
func TestViewLearns(t *testing.T) {
	var v View
	learns := func(version int64) *permit.Terms {
		inForce := terms(time.Second, 1)
		inForce.Version, inForce.Text = version, fmt.Sprint("steady ", version)
		v.terms = &granted{Terms: inForce}
		v.learn(inForce)
		return inForce
	}
	require.Same(t, learns(1), v.known.Load())
	require.Same(t, learns(2), v.known.Load())
	learns(0)
	require.Nil(t, v.known.Load())
}

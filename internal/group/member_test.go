package group

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// memberOf returns a member of a bucket that nobody knows yet.
func memberOf(b *bucket) *member {
	return &member{Member: Member{b.limiter, 1}, account: account{stored: permit.MaxBatch}, lost: new(atomic.Int64)}
}

// shows returns a reply in which a bucket has terms.
func shows(t *permit.Terms) *permit.Outcome {
	return &permit.Outcome{NowMicros: start, ClockMicros: start, Bucket: permit.Bucket{Terms: t, Balance: permit.Balance{Next: start}}}
}

// A member decides by the configuration with the highest version that it knows, its limiter's own included.
func TestMemberEffective(t *testing.T) {
	b := bucketOf("x", time.Second, 1)
	version := func(v int64) *permit.Terms { c := *b.terms; c.Version = v; return &c }
	b.limiter.Own = version(3)
	m := memberOf(b)
	require.Equal(t, b.limiter.Own, m.effective())
	for _, step := range []struct {
		name        string
		shown, want *permit.Terms
	}{
		{"an older one", version(2), b.limiter.Own},
		{"a newer one", version(5), version(5)},
		{"a server that fell back", version(4), version(5)},
		{"a bucket that lost its version", version(0), b.limiter.Own},
	} {
		m.observe(shows(step.shown), start, 0)
		require.Equal(t, step.want.Version, m.effective().Version, step.name)
	}
}

// What a reply shows of a bucket: its debt by the limiter's clock, and the stored permits that take no time.
func TestMemberObserve(t *testing.T) {
	b := bucketOf("x", time.Second, 9)
	m := memberOf(b)
	out := shows(b.terms)
	out.NowMicros, out.Bucket.Balance = start+5*second, permit.Balance{Next: start + 8*second, Stored: 4.5}
	require.Zero(t, m.observe(out, start, 10*ms))
	assert.Equal(t, start+3*second, m.free)
	assert.Equal(t, int64(4), m.stored)
	assert.Equal(t, -5*second, m.offset.Micros())
	assert.Equal(t, start+10*second, m.dueOf(1, 11, start), "7 of the 11 have to be earned after the debt")
	assert.Equal(t, start+3*second, m.dueOf(1, 4, start))

	cold := *b.terms
	cold.WarmsUp = true
	out.Bucket.Terms = &cold
	m.observe(out, start, 10*ms)
	assert.Zero(t, m.stored, "the stored permits of a warming bucket take time")

	later := cold
	later.PayLater = true
	later.Version = 1
	out.Bucket.Terms = &later
	m.observe(out, start, 10*ms)
	assert.Equal(t, start+13*second, m.dueOf(1, 11, start), "the call waits for those ahead, and not for its own cost")

	out.Bucket.PausedMicros, out.Bucket.HeldUntilMicros = 2*second, start+9*second
	require.Equal(t, shift{longer: 2 * second, until: start + 4*second}, m.observe(out, start, 10*ms))
	require.Zero(t, m.observe(out, start, 10*ms), "a penalty is new once")
	out.Bucket.PausedMicros, out.Bucket.HeldUntilMicros = 0, 0
	require.Equal(t, 4*second, m.observe(out, start, 10*ms).shorter)
}

// No batch has refunds for more than a quarter of its room. The others wait, newest first.
func TestMemberRefunds(t *testing.T) {
	m := memberOf(bucketOf("x", time.Second, 1))
	for i := range int64(permit.MaxBatch/4 + 2) {
		m.giveBack(&refund{give: permit.Refund{ID: i}})
	}
	some := m.addRefunds(nil)
	require.Len(t, some, permit.MaxBatch/4)
	require.Equal(t, int64(permit.MaxBatch/4+1), some[0].refund.give.ID)
	require.Len(t, m.refunds, 2)
	require.Equal(t, []int64{1, 0}, []int64{m.refunds[0].give.ID, m.refunds[1].give.ID})
}

// session counts its releases.
type session struct{ released int }

func (s *session) Release()    { s.released++ }
func (s *session) Kept() bool  { return false }
func (s *session) Waits() bool { return true }

// A session travels with one batch at a time. That of a late batch is released, not kept.
func TestMemberSession(t *testing.T) {
	made := 0
	config := &Config{NewSession: func() permit.Session { made++; return new(session) }}
	m := memberOf(bucketOf("x", time.Second, 1))
	var first, second, third permit.Batch
	m.begin(&first, config)
	m.begin(&second, config)
	require.NotSame(t, first.Session, second.Session, "the first is in flight")
	m.keepSession(&second, false)
	m.keepSession(&first, true)
	require.Equal(t, 1, first.Session.(*session).released)
	m.begin(&third, config)
	require.Same(t, second.Session, third.Session)
	require.Zero(t, third.Session.(*session).released)
	require.Equal(t, 2, made)
}

// The look-ahead of a batch counts what the requests before take from the stored permits, and then in time.
func TestMemberLook(t *testing.T) {
	b := bucketOf("x", 100*time.Millisecond, 9)
	m := memberOf(b)
	m.stored = 2
	l := m.look(0)
	want := engine.LookAhead(b.terms, engine.Normal, 1, 0, 0)
	for range 3 {
		most, more := l.bound(1)
		require.Equal(t, want, most)
		require.True(t, more)
	}
	require.Equal(t, 100*ms, l.ahead)
	for range 19 {
		_, more := l.bound(1)
		require.True(t, more)
	}
	_, more := l.bound(1)
	require.False(t, more, "beyond two horizons")
}

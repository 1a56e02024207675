package tokenbucket

import (
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// cachedState is what a process keeps of a bucket from one batch to the next. It knows the state, so it can compute beforehand
// what the next batch makes of it, and Redis need only compare and write.
type cachedState struct {
	bucket, lock string // the keys
	state        PermitBucket
	text         string // of the state; "": unknown
	unchanged    int    // so many batches in a row found the bucket as the one before had left it
	expires      int64  // milliseconds of the store's clock until which the key lives at least

	// Of a lock that others wait for:
	token   string        // as long as it is kept,
	owner   *RedisStore   // and who releases it
	batches int           // batches decided under it
	yield   time.Duration // see mono: until then it is theirs
	held    atomic.Bool   // they have it now, and the batch waits
}

// cacheOf returns what is known of the batch's bucket.
func (s *redisBase) cacheOf(batch *batch) *cachedState {
	m, ok := batch.cached.(*cachedState)
	if !ok {
		m = &cachedState{} // nobody will remember
	}
	m.held.Store(false)
	if m.bucket == "" {
		m.bucket, m.lock = s.keys(batch.Name)
	}
	return m
}

// remember notes a state that was found, and the one that the batch left behind, if any.
func (m *cachedState) remember(old string, read *PermitBucket, out *outcome, new string) {
	if m.text == old {
		m.unchanged++
	} else {
		m.unchanged = 0
	}
	switch {
	case out.Changed:
		m.state, m.text = out.Bucket, new
		m.expires = out.ClockMicros/1000 + out.Bucket.ttlMillis(out.NowMicros)
	default:
		if m.text != old {
			m.expires = 0
		}
		m.state, m.text = *read, old
	}
}

// prediction is what a batch makes of the remembered state at a time of the store's clock that has surely come: an outcome
// which stands if the bucket is still what is remembered. It is exact, for it is what the store would have decided at
// that time. The script writes nothing if that time is more than 100 ms ago (GUESS_AGE in lua/apply.lua).
type prediction struct {
	asOf  int64
	local int64 // the limiter's clock then
	text  string
	out   outcome
}

// predict computes a prediction, if there is one to make: all requests must be granted, since a refusal should be told by
// the latest time.
func (m *cachedState) predict(batch *batch, asOf int64, g *prediction) bool {
	if m.text == "" || asOf == 0 {
		return false
	}
	b := m.state
	g.asOf, g.local = asOf, clock.FromMicros(batch.LocalMicros())
	var err error
	if err = b.apply(asOf, batch, &g.out); err != nil || !g.out.Changed {
		return false
	}
	for i := range batch.Requests {
		if !batch.Requests[i].Grant.OK {
			return false
		}
	}
	if asOf/1000+b.ttlMillis(g.out.NowMicros)-spareTTL > m.expires {
		return false // the key must live longer than it will
	}
	var buf [256]byte
	g.text = string(b.appendText(buf[:0]))
	return true
}

// confirmed notes that a prediction was written.
func (m *cachedState) confirmed(g *prediction, out *outcome) {
	m.state, m.text = g.out.Bucket, g.text
	*out = g.out
	out.local = g.local
}

// asOf is a time that the store's clock has surely reached; 0: none is known.
func asOf(server *clock.Remote) int64 {
	if !server.Known() {
		return 0
	}
	return server.Earliest(clock.Mono())
}

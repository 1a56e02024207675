package redisbucket

import (
	"sync/atomic"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Session is what a process remembers of a bucket between two batches: the state, from which it can predict the outcome of the next batch,
// and a lock that it keeps for that batch.
//
// A session belongs to one batch at a time, and only the goroutine that decides the batch uses it. Waits may be called by any goroutine.
type Session struct {
	bucket, lock string // the keys
	state        Bucket // remembered; nil before the first batch
	text         string // of state; "" if the state is unknown
	unchanged    int    // number of batches in a row that found the state which the previous batch had left
	expires      int64  // when the key expires at the earliest, in milliseconds of the store's clock

	movesUntil time.Duration // clock.Mono until which the bucket's slot counts as moving; 0 if it does not

	token   string        // of the lock that is kept for the next batch; "" if none is
	owner   *LockStore    // releases the kept lock
	batches int           // number of batches decided under the lock
	yield   time.Duration // clock.Mono until which the lock is left to other processes
	held    atomic.Bool   // another process holds the lock, and the batch in flight waits for it
}

// sessionOf returns the session of a batch. A batch without one gets a new session, which is forgotten afterwards.
func (s *Store) sessionOf(batch *permit.Batch) *Session {
	m, ok := batch.Session.(*Session)
	if !ok {
		m = &Session{}
	}
	if m.state == nil {
		m.state = s.newBucket()
	}
	m.held.Store(false)
	if m.bucket == "" {
		m.bucket, m.lock = s.Keys(batch.Key)
	}
	if m.text != "" {
		s.reviewEviction(m.bucket)
	}
	return m
}

// remember notes the state that a batch found, or the one that it has left behind if it has changed the state; new is the text of that.
func (m *Session) remember(old string, batch *permit.Batch, left Bucket, new string) {
	out := &batch.Outcome
	if m.text == old {
		m.unchanged++
	} else {
		m.unchanged = 0
	}
	switch {
	case out.Changed:
		m.state.Set(left)
		m.text = new
		ttl, _ := left.TTLMillis(out.NowMicros, batch)
		m.expires = out.ClockMicros/1000 + ttl
	case m.text != old:
		m.text, m.expires = old, 0
		if err := m.state.Parse(old, batch.Terms); err != nil {
			m.text = ""
		}
	}
}

// prediction is the outcome of a batch on the remembered state, at a time that the store's clock has certainly reached. It is what the store
// would have decided at that time, so it is exact as long as the bucket still has the remembered state. The script does not write a
// prediction that is more than 100 ms old (GUESS_AGE in lua/bucket.lua).
type prediction struct {
	asOf  int64  // the time of the decision, by the store's clock
	local int64  // the same time by the limiter's clock
	text  string // of the state afterwards, which is scratch.left
	out   permit.Outcome
}

// scratch is the memory that one decision needs. Sharing it keeps what a process touches for thousands of buckets small.
type scratch struct {
	left       Bucket // the state that the batch leaves behind
	prediction prediction
	buffer     []byte
}

// text returns the text of left, which is valid until the next call.
func (w *scratch) text() []byte {
	w.buffer = w.left.AppendText(w.buffer[:0])
	return w.buffer
}

// predict computes a prediction. It reports false if there is none to send: the state or the time is unknown, the key would have to live
// longer, or a request would be refused, since a refusal must be decided at the latest time.
func (m *Session) predict(batch *permit.Batch, asOf int64, w *scratch) bool {
	if m.text == "" || asOf == 0 {
		return false
	}
	b, g := w.left, &w.prediction
	b.Set(m.state)
	g.asOf, g.local = asOf, clock.FromMicros(batch.LocalMicros())
	if err := b.Decide(asOf, batch, &g.out); err != nil || !g.out.Changed {
		return false
	}
	for i := range batch.Requests {
		if !batch.Requests[i].Grant.OK {
			return false
		}
	}
	if _, least := b.TTLMillis(g.out.NowMicros, batch); asOf/1000+least > m.expires {
		return false // a prediction does not prolong the key
	}
	g.text = string(w.text())
	return true
}

// confirmed notes that the store has written the prediction, and copies its outcome.
func (m *Session) confirmed(w *scratch, out *permit.Outcome) {
	m.state.Set(w.left)
	m.text = w.prediction.text
	*out = w.prediction.out
	out.Local = w.prediction.local
}

// asOf returns a time that the store's clock has certainly reached; 0 if the clock is not known yet.
func asOf(server *clock.Remote) int64 {
	if !server.Known() {
		return 0
	}
	return server.Earliest(clock.Mono())
}

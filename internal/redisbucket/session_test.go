package redisbucket

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// strict is a counter that refuses requests for more than a number of permits.
type strict struct {
	counter
	most int64
}

func (s *strict) Decide(nowMicros int64, b *permit.Batch, out *permit.Outcome) error {
	err := s.counter.Decide(nowMicros, b, out)
	for i := range b.Requests {
		b.Requests[i].Grant.OK = b.Requests[i].Permits <= s.most
	}
	return err
}

func (s *strict) Set(o Bucket) { s.counter = o.(*strict).counter }

func taking(permits int64) *permit.Batch {
	return &permit.Batch{
		Name: "x", Terms: &permit.Terms{Text: "x"}, LocalMicros: func() int64 { return 1 }, Requests: []permit.Request{{Op: permit.Take, Permits: permits}},
	}
}

// A prediction is made of a state that is known, for a time that is known, if it grants all requests: a refusal is decided by the server, at
// the latest time.
func TestPredictionGrantsAll(t *testing.T) {
	m := &Session{state: &strict{counter{7}, 5}, text: "7", expires: 1 << 62}
	w := &scratch{left: &strict{most: 5}}
	require.True(t, m.predict(taking(2), 1000, w))
	require.Equal(t, "9", w.prediction.text)
	require.False(t, m.predict(taking(6), 1000, w), "it would be refused")
	require.False(t, m.predict(taking(2), 0, w), "the time is unknown")
	m.text = ""
	require.False(t, m.predict(taking(2), 1000, w), "the state is unknown")
}

// Predictions begin again after minUnchanged batches that have found what the one before had left.
func TestUnchangedAreCounted(t *testing.T) {
	m := &Session{state: &strict{most: 5}}
	left := &strict{counter{1}, 5}
	b := taking(1)
	b.Outcome.Changed = true
	m.remember("", b, left, "1")
	for range minUnchanged {
		m.remember("1", b, left, "1")
	}
	require.GreaterOrEqual(t, m.unchanged, minUnchanged)
	m.remember("5", b, left, "1")
	require.Zero(t, m.unchanged, "another process has changed it")
}

// A reply whose state differs from that which this process computes is an error, and the state is forgotten.
func TestReplayIsCompared(t *testing.T) {
	m := &Session{bucket: "x", state: new(strict), text: "3"}
	a := &attempt{batch: taking(2), session: m, scratch: &scratch{left: &strict{most: 5}}}
	got, err := a.decode(1000, "decided\n3\n5")
	require.NoError(t, err)
	require.Equal(t, decided, got)
	require.Equal(t, "5", m.text)
	_, err = a.decode(1000, "decided\n5\n8")
	require.ErrorContains(t, err, `Redis decided "8", but this process computes "7" from "5"`)
	require.Empty(t, m.text)
}

// A batch ends when its last caller gives up, or with the store timeout if that is sooner.
func TestEndOfABatch(t *testing.T) {
	now := time.Now()
	i := &item{Batch: &permit.Batch{Until: now.Add(time.Second)}, Deadline: now.Add(time.Minute)}
	require.Equal(t, now.Add(time.Second), endOf(i))
	i.Deadline = now
	require.Equal(t, now, endOf(i))
}

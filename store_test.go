package tokenbucket

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// table is a Store that misbehaves on demand.
type table struct {
	mu            sync.Mutex
	states        map[string][]byte
	before, after error // of the next step: of one that writes nothing, or of one that is written
	twice         bool  // decides first on a bucket that has forgotten, as a transaction that is tried again may
	idle          bool  // does not call Decide
	extra         bool  // hands over one state too many
}

func (s *table) Apply(_ context.Context, b *Batch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.idle {
		return nil
	}
	now := time.Now().UnixMicro()
	states := [][]byte{s.states[b.Names[0]]}
	if s.extra {
		states = append(states, nil)
	}
	if s.twice {
		if _, _, err := b.Decide(now-1000, make([][]byte, len(b.Names))); err != nil {
			return err
		}
	}
	next, _, err := b.Decide(now, states)
	if err != nil {
		return err
	}
	before, after := s.before, s.after
	s.before, s.after = nil, nil
	if before != nil {
		return before
	}
	if next[0] != nil {
		if s.states == nil {
			s.states = map[string][]byte{}
		}
		s.states[b.Names[0]] = next[0]
	}
	return after
}

// An error of Apply is returned to the caller, whether or not the state was written. If it was written, the permits of one call are lost.
func TestErrorsOfAStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		lost := errors.New("lost")
		s := new(table)
		l, err := NewSmoothBursty("x", 1.0/86_400, WithStore(s), WithMaxPermits(5), WithInitialPermits(5))
		require.NoError(t, err)
		take := func() error {
			ok, err := l.TryAcquire(background, 1, 0)
			require.Equal(t, err == nil, ok)
			return err
		}
		left := func() float64 {
			b, err := l.State(background)
			require.NoError(t, err)
			return float64(int(b.StoredPermits))
		}
		require.NoError(t, take())
		require.Equal(t, 4.0, left())
		s.before = lost
		require.ErrorIs(t, take(), lost)
		require.Equal(t, 4.0, left())
		s.after = lost
		require.ErrorIs(t, take(), lost)
		require.Equal(t, 3.0, left())
		require.NoError(t, take())
		require.Equal(t, 2.0, left())
	})
}

// Only the last call of Decide counts, with the states it got: two permits are left here, not the five of a new bucket.
func TestDecideTwice(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := new(table)
		l, err := NewSmoothBursty("x", 1.0/86_400, WithStore(s), WithMaxPermits(5), WithInitialPermits(5))
		require.NoError(t, err)
		ok, err := l.TryAcquire(background, 3, 0)
		require.NoError(t, err)
		require.True(t, ok)
		s.twice = true
		for _, want := range []bool{true, true, false} {
			ok, err = l.TryAcquire(background, 1, 0)
			require.NoError(t, err)
			require.Equal(t, want, ok)
		}
	})
}

// A store that breaks its contract gets an error, and the value of another program is not overwritten.
func TestWrongStores(t *testing.T) {
	for want, s := range map[string]*table{
		"has not called Decide":             {idle: true},
		"2 states: want one for each name":  {extra: true},
		"corrupt state: bucket \"x\": text": {states: map[string][]byte{"x": []byte("hello")}},
	} {
		bubble(t, func(t *testing.T) {
			l, err := NewSmoothBursty("x", 5, WithStore(s))
			require.NoError(t, err)
			_, err = l.Try(background)
			require.ErrorContains(t, err, want)
			require.LessOrEqual(t, len(s.states["x"]), len("hello"))
		})
	}
}

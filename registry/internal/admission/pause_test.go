package admission

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	tokenbucket "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/clock"
)

// A bucket that could not be made keeps no penalty: the next to ask does not get the one of before, which is the other kind's.
func TestKeeperThatCannotBeMade(t *testing.T) {
	var p Pause
	store := tokenbucket.NewMemoryStore()
	good := func(bool) (*tokenbucket.RateLimiter, error) {
		return tokenbucket.NewSmoothBursty("/a", 1, tokenbucket.WithStore(store))
	}
	before, err := p.keeperOf(Bucket{Limiter: good}, nil)
	require.NoError(t, err)
	same, err := p.keeperOf(Bucket{Limiter: good}, nil)
	require.NoError(t, err)
	require.Same(t, before, same)
	_, err = p.keeperOf(Bucket{Shadow: true, Limiter: func(bool) (*tokenbucket.RateLimiter, error) { return nil, tokenbucket.ErrInvalidConfig }}, nil)
	require.ErrorIs(t, err, tokenbucket.ErrInvalidConfig)
	after, err := p.keeperOf(Bucket{Shadow: true, Limiter: good}, nil)
	require.NoError(t, err)
	require.NotSame(t, before, after)
}

// A penalty that begins and is stored while a load reads the bucket is not ended by what the load has read.
func TestPenaltyThatBeginsDuringALoad(t *testing.T) {
	var p Pause
	before := p.asking()
	until := int64(clock.Mono() + time.Hour)
	p.begins(until)
	p.stored(until)
	p.learned(0, before)
	require.Positive(t, p.Left())
	p.learned(0, p.asking())
	require.Zero(t, p.Left())
}

// A penalty that the store has not acknowledged lasts, whatever a load reads.
func TestPenaltyThatIsNotStored(t *testing.T) {
	var p Pause
	p.begins(int64(clock.Mono() + time.Hour))
	p.learned(0, p.asking())
	require.Positive(t, p.Left())
	p.ended()
	require.Zero(t, p.Left())
}

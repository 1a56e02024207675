package tokenbucket

import (
	"math"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Level is how full a bucket was after a decision.
type Level struct {
	// MaxPermits is the most that can be taken at once; of a bucket that warms up, 1. Rate is in permits per second.
	MaxPermits, Rate float64
	// Remaining permits could be taken without a wait.
	Remaining float64
	// Full is the time until MaxPermits could be taken without a wait, if nobody asks meanwhile.
	Full time.Duration
}

// level is how full a bucket is.
func (s *setting) level(m permit.Balance, now int64) *Level {
	m = s.resync(m, now, s.max)
	debt := m.Next - now
	v := &Level{MaxPermits: 1, Rate: s.Rate, Full: time.Duration(debt) * time.Microsecond}
	switch {
	case s.Kind == bursty:
		v.MaxPermits = s.max
		micros := min(float64(debt)+float64((s.max-m.Stored)*s.interval), math.MaxInt64/2000)
		v.Full = time.Duration(max(0, s.ceil(micros))) * time.Microsecond
		if debt == 0 {
			v.Remaining = m.Stored
			if whole := math.Round(m.Stored); math.Abs(m.Stored-whole) < shortfall {
				v.Remaining = whole // so many pass at once
			}
		}
	case debt == 0:
		v.Remaining = 1
	}
	return v
}

package engine

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// At full demand of n processes of the highest class, each owns 2 (L − D) of the debt D, where n × 2 (L − D) = D. So the part of one of them
// is 1/n, whatever the class that they hold back. If the debt ends within the look-ahead of Low, it is Low that holds back Lowest.
func TestPartOfAProcess(t *testing.T) {
	terms := &permit.Terms{Interval: 1000}
	for n := 1; n <= 50; n *= 5 {
		for _, c := range []Class{Low, Lowest} {
			debt := int64(float64(Normal.reach(terms, 0)) * float64(n) / (float64(n) + 0.5))
			require.InDelta(t, 1/float64(n), part(terms, c, debt), 0.001, "%d processes of Normal above %v", n, c)
		}
		debt := int64(float64(Low.reach(terms, 0)) * float64(n) / (float64(n) + 0.5))
		require.InDelta(t, 1/float64(n), part(terms, Lowest, debt), 0.001, "%d processes of Low above Lowest", n)
	}
	slow := &permit.Terms{Interval: 200_000}
	require.InDelta(t, 0.25, part(slow, Low, Normal.reach(slow, 0)), 0.001, "one permit, of four in the debt")
	require.InDelta(t, 1, part(slow, Lowest, 0), 0, "without a debt")
}

// A class earns credit by the time for which it is held back, but not for more than a horizon at once. Its first requests use the credit.
func TestFloorCredit(t *testing.T) {
	terms := &permit.Terms{Interval: 10_000} // 100/s
	debt := int64(660_000)                   // of one process
	var f Floor
	f.Earn(terms, Low, 0.05, debt, 1, 1_000_000)
	require.Zero(t, f.credit, "the first refusal")
	f.Earn(terms, Low, 0.05, debt, 1, 1_300_000)
	require.InDelta(t, 1.5, f.credit, 0.01, "5/s for 0.3 s")

	batch := f
	require.Equal(t, Normal, batch.Next(Low, 1))
	require.Equal(t, Low, batch.Next(Low, 1))
	require.InDelta(t, 1.5, f.credit, 0.01, "the batch has a copy")
	batch = f
	require.Equal(t, Low, batch.Next(Low, 2))
	require.Equal(t, Low, batch.Next(Low, 1), "it must not use up the credit of the request ahead")

	f.Spend(1)
	require.InDelta(t, 0.5, f.credit, 0.01)
	f.Spend(40)
	require.Zero(t, f.credit, "a class that gets permits is not held back")
	f.Earn(terms, Low, 0.05, debt, 1, 60_000_000)
	require.InDelta(t, 5, f.credit, 0.01, "one horizon of an hour")
	for i := range int64(100) {
		f.Earn(terms, Low, 0.05, debt, 20, (61+i)*1_000_000)
	}
	require.InDelta(t, 20, f.credit, 0.01, "as much as the first request needs")

	f = Floor{}
	for i := range int64(10) {
		f.Earn(terms, Normal, 0.05, debt, 1, (1+i)*1_000_000)
		f.Earn(terms, Low, 0, debt, 1, (1+i)*1_000_000)
	}
	require.Zero(t, f.credit, "neither the highest class nor a share of 0 earns")
}

// The look-ahead of a lower class is shorter, but never by the cost of its request, so it can use a free bucket.
func TestLookAheadOfClasses(t *testing.T) {
	for interval, want := range map[time.Duration][Classes]int64{
		time.Millisecond:       {1_000_000, 300_000, 100_000},
		50 * time.Millisecond:  {1_000_000, 300_000, 100_000},
		200 * time.Millisecond: {1_000_000, 300_000, 200_000},
		time.Second:            {4_000_000, 1_200_000, 1_000_000},
	} {
		bucket := terms(interval, 0)
		for c := Normal; c < Classes; c++ {
			require.InDelta(t, want[c], LookAhead(bucket, c, 1, 0, 0), 1, "%v, %v", c, interval)
			require.GreaterOrEqual(t, LookAhead(bucket, c, 1, 2_000_000_000, 0), int64(0))
		}
	}
}

// From far away a lower class looks ahead two round trips, but never farther than the highest class.
func TestLookAheadKnowsItsRoundTrip(t *testing.T) {
	bucket := terms(50*time.Millisecond, 0)
	for trip, want := range map[int64][Classes]int64{
		40_000:    {1_000_000, 300_000, 100_000},
		100_000:   {1_000_000, 300_000, 200_000},
		200_000:   {1_000_000, 400_000, 400_000},
		3_000_000: {1_000_000, 1_000_000, 1_000_000},
	} {
		for c := range Classes {
			require.InDelta(t, want[c], LookAhead(bucket, c, 1, 0, trip), 1, "%v, %v", c, trip)
		}
	}
}

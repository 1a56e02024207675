package tokenbucket

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// A batch that arrives twice gives its settlements back once: at once, after as many other settlements as the bucket remembers, behind forty refunds of
// other grants, and after a penalty, which begins another epoch of the same lineage.
func TestSettlementArrivesTwice(t *testing.T) {
	const now = 1_700_000_000_000_000
	c := config{Kind: bursty, Rate: 10, Size: 1000}
	batch := func(epoch int64, requests ...permit.Request) *permit.Batch {
		return &permit.Batch{Terms: termsOf(c), Initial: 0, Epoch: epoch, Requests: requests}
	}
	for name, meanwhile := range map[string]func(b *PermitBucket, of permit.Origin) (moved int64){
		"at once": func(*PermitBucket, permit.Origin) int64 { return 0 },
		"after others": func(b *PermitBucket, of permit.Origin) int64 {
			for i := range int64(maxSettled - 1) {
				require.NoError(t, b.apply(now, batch(1000+i, permit.Request{Op: permit.Settle, Permits: -1, Origin: of}), new(permit.Outcome)))
			}
			return -(maxSettled - 1) * 100_000
		},
		"behind refunds": func(b *PermitBucket, _ permit.Origin) int64 {
			for range 40 {
				place := takeAt(t, b, now, 1, maxExact).Place
				takeAt(t, b, now, 1, maxExact)
				back := permit.OutOfTurn(place.Epoch, place.Version, place.ID, 1, place.After, place.Returned)
				_, ok := b.giveBack(now, &back)
				require.True(t, ok)
			}
			require.Len(t, b.returned, maxReturned)
			return 40 * 100_000
		},
		"after a penalty": func(b *PermitBucket, _ permit.Origin) int64 {
			require.NoError(t, b.apply(now, batch(77, permit.Request{Op: permit.Hold, HoldMicros: 1_000_000}), new(permit.Outcome)))
			return 1_000_000
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := bucketOf(t, c, 0, now)
			g := takeAt(t, b, now, 100, maxExact)
			of := g.Place.Origin()
			owed := func() int64 { return b.NextFreeTicketMicros - int64(b.StoredPermits*b.IntervalMicros) }
			settle := batch(4711, permit.Request{Op: permit.Settle, Permits: -30, Origin: of}, permit.Request{Op: permit.Settle, Permits: -20, Origin: of})
			again := *settle
			again.Requests = slices.Clone(settle.Requests)
			before := owed()
			require.NoError(t, b.apply(now, settle, new(permit.Outcome)))
			require.Equal(t, before-5_000_000, owed(), "both settlements of the batch")
			before = owed() + meanwhile(b, of)
			require.Equal(t, before, owed())
			require.NoError(t, b.apply(now, &again, new(permit.Outcome)))
			require.Equal(t, before, owed(), "they came back once")
			var read PermitBucket
			require.NoError(t, read.UnmarshalText(b.appendText(nil)))
			require.Equal(t, b.returned, read.returned)
		})
	}
}

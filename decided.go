package tokenbucket

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Decided returns the decisions of a batch once Apply has returned nil: the time of the store's clock in microseconds, the decision about
// each request for permits (Bucket, Permits, Granted and Wait of a [Decision]), and the number of refunds among the requests. It is for
// stores that wrap another, to keep a ledger for example. A Batch that the engine did not create has no decisions.
func (b *Batch) Decided() (nowMicros int64, decisions []Decision, refunds int) {
	var batches []*permit.Batch
	switch {
	case b.asked != nil:
		batches = []*permit.Batch{b.asked.Batch}
	case b.together != nil:
		batches = b.together.Members
	}
	for _, batch := range batches {
		nowMicros = batch.Outcome.NowMicros
		for i := range batch.Requests {
			switch r := &batch.Requests[i]; r.Op {
			case permit.Take:
				decisions = append(decisions, Decision{
					Bucket: label(batch.Name), Permits: int(r.Permits), Granted: r.Grant.OK, Wait: time.Duration(r.Grant.WaitMicros) * time.Microsecond,
				})
			case permit.GiveBack:
				refunds++
			}
		}
	}
	return nowMicros, decisions, refunds
}

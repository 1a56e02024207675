package tokenbucket

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// Decided returns the decisions of a batch once Apply has returned nil: the time of the store's clock in microseconds, the decision about
// each request for permits (Bucket, Permits, Granted and Wait of a [Decision]), and the number of refunds among the requests. It is for
// stores that wrap another, to keep a ledger for example. A Batch that the engine did not create has no decisions.
func (b *Batch) Decided() (nowMicros int64, decisions []Decision, refunds int) {
	if b.asked == nil {
		return 0, nil, 0
	}
	for i := range b.asked.Requests {
		switch r := &b.asked.Requests[i]; r.Op {
		case permit.Take:
			decisions = append(decisions, Decision{
				Bucket: label(b.asked.Name), Permits: int(r.Permits), Granted: r.Grant.OK, Wait: time.Duration(r.Grant.WaitMicros) * time.Microsecond,
			})
		case permit.GiveBack:
			refunds++
		}
	}
	return b.asked.Outcome.NowMicros, decisions, refunds
}

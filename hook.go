package tokenbucket

import "github.com/go-tokenbucket/tokenbucket/internal/seam"

// Tools and tests of this repository look into batches, which users need not.
func init() {
	seam.DecidedIn = func(b any) seam.Decided { return b.(*Batch).asked.seen() }
	seam.Answer = answer
	seam.Read = func(b any, state string) error { return b.(*PermitBucket).unmarshal(state) }
}

// seen is what was decided.
func (b *batch) seen() (d seam.Decided) {
	d.NowMicros = b.out.NowMicros
	for i := range b.Requests {
		switch r := &b.Requests[i]; r.Op {
		case opTake:
			d.Takes = append(d.Takes, seam.Take{
				Permits: r.Permits, MaxWaitMicros: r.MaxWaitMicros, Granted: r.Grant.OK, WaitMicros: r.Grant.WaitMicros,
			})
		case opGiveBack:
			d.Refunds++
		}
	}
	return d
}

// answer is what the arithmetic makes of a bucket.
func answer(q seam.Question, now int64, takes []seam.Take) (string, error) {
	s := scanner{rest: q.Config}
	c := s.config()
	if s.err != nil {
		return "", s.err
	}
	var b PermitBucket
	if err := b.parse(q.State, nil); err != nil {
		return "", err
	}
	asked := batch{config: c, Known: c, Initial: q.Initial, Epoch: q.Epoch}
	for _, t := range takes {
		asked.Requests = append(asked.Requests, request{Op: opTake, Permits: t.Permits, MaxWaitMicros: t.MaxWaitMicros})
	}
	if err := b.apply(now, &asked, &asked.out); err != nil {
		return "", err
	}
	for i := range takes {
		g := &asked.Requests[i].Grant
		takes[i].Granted, takes[i].WaitMicros = g.OK, g.WaitMicros
	}
	return string(b.appendText(nil)), nil
}

package group

import (
	"context"
	"fmt"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// grant is the permits of one call.
type grant struct {
	permits int64
	due     int64 // when the last part is due, by the limiter's clock
	parts   []part
}

// part is a member's part of a grant.
type part struct {
	taken bool
	place permit.Place
	terms *permit.Terms
	at    int64 // of the decision, by the store's clock
	due   int64 // by the limiter's clock
	spent int64 // the time of the bucket that it takes
}

// refund is permits of one member on their way back.
type refund struct {
	give    permit.Refund
	permits int64
	confirm *confirm
}

// confirm lets a caller wait for the replies to its refunds.
type confirm struct {
	open int
	err  error
	done chan struct{}
}

func (c *confirm) settled(err error) {
	if c == nil {
		return
	}
	if c.open--; err != nil {
		c.err = err
	}
	if c.open == 0 {
		close(c.done)
	}
}

// leave abandons a call. It reports false if the call has ended before.
func (p *Participant) leave(q *Call) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.local.Now()
	p.queue.release(now)
	if q.state > owned {
		return false
	}
	p.queue.abandon(q, nil, now)
	p.dispatch(now)
	return true
}

// Cancel gives back the permits of a reservation that are not due yet, and waits for the replies. It reports whether it did.
func (p *Participant) Cancel(ctx context.Context, q *Call) (gone bool, err error) {
	c := &confirm{done: make(chan struct{})}
	p.mu.Lock()
	now := p.local.Now()
	p.queue.release(now)
	if gone = q.state <= owned; gone {
		p.queue.abandon(q, c, now)
		p.dispatch(now)
	}
	open := c.open
	p.mu.Unlock()
	if open == 0 {
		return gone, nil
	}
	return gone, p.confirmed(ctx, c)
}

// Return gives back the permits of a reservation even if they were due at once.
func (p *Participant) Return(ctx context.Context, q *Call) error {
	p.mu.Lock()
	if q.unused == nil {
		p.mu.Unlock()
		_, err := p.Cancel(ctx, q)
		return err
	}
	c := &confirm{done: make(chan struct{})}
	p.queue.giveBack(q.unused, c)
	q.unused = nil
	p.dispatch(p.local.Now())
	p.mu.Unlock()
	return p.confirmed(ctx, c)
}

// confirmed waits for the replies to refunds, but not for longer than the store timeout.
func (p *Participant) confirmed(ctx context.Context, c *confirm) error {
	timeout := time.NewTimer(max(p.Timeout, time.Second))
	defer timeout.Stop()
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return ctx.Err()
	case <-timeout.C:
		return p.Failure(p.awaited(nil), fmt.Errorf("%w: cancel was not answered within %v", permit.ErrStoreTimeout, p.Timeout))
	}
}

// settle computes the due time from those of the parts.
func (g *grant) settle() {
	g.due = 0
	for i := range g.parts {
		if g.parts[i].taken {
			g.due = max(g.due, g.parts[i].due)
		}
	}
}

// granted returns the grant of a joint request; nil if it was refused or has failed. What parts have granted to such a request goes back. mu must
// be held.
func (p *Participant) granted(f *flight, i int, now int64) (g *grant) {
	taken, best := 0, -1
	for k := range f.parts {
		j, ok := f.find(k, i)
		if !ok {
			continue
		}
		for _, m := range p.Parts[k] {
			r := f.request(m, j)
			grant := &r.Grant
			if !grant.OK {
				continue
			}
			if g == nil {
				g = newGrant(r.Permits/p.Members[m].Weight, len(p.members))
			}
			if best >= 0 && p.Choice == permit.Any { // a later part is due sooner
				p.giveBackPart(g, best)
				taken--
			}
			taken++
			best = m
			if q := f.rows[i]; q != nil && !q.reserves {
				p.members[m].floor.Spend(r.Permits)
			}
			out := &f.batch[m].Outcome
			due := receivedAt(out, now)
			if grant.WaitMicros > 0 {
				due = out.NowMicros + grant.WaitMicros + p.members[m].offset.Micros()
			}
			g.parts[m] = part{true, grant.Place, out.Bucket.Terms, out.NowMicros, due, grant.Place.After.Next - grant.Place.Before.Next}
		}
	}
	if g == nil {
		return nil
	}
	g.settle()
	if p.Choice == permit.All && taken < len(p.members) {
		p.queue.giveBack(g, nil)
		return nil
	}
	return g
}

// newGrant returns a grant without parts, in one allocation for a usual number of members.
func newGrant(permits int64, members int) *grant {
	if members > 4 {
		return &grant{permits: permits, parts: make([]part, members)}
	}
	g := &struct {
		grant
		room [4]part
	}{grant: grant{permits: permits}}
	g.parts = g.room[:members]
	return &g.grant
}

// giveBackPart gives one part of a grant back. mu must be held.
func (p *Participant) giveBackPart(g *grant, m int) {
	one := &grant{permits: g.permits, parts: make([]part, len(g.parts))}
	one.parts[m] = g.parts[m]
	g.parts[m] = part{}
	p.queue.giveBack(one, nil)
}

package group

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/permit"
)

// grant is the permits of one call.
type grant struct {
	permits int64
	due     int64 // when the last part is due, by the limiter's clock
	parts   []part
	open    int // refunds of its parts that have no reply
	refused int // refunds of its parts that were refused since it was sent back last
	back    attempt
	confirm *confirm // of the caller that waits for its refunds; nil if none does
}

// attempt is what was tried to give a grant back.
type attempt uint8

const (
	none      attempt = iota
	inTurn            // the time of its parts, which the members refuse once other permits were taken behind them
	outOfTurn         // its permits, see [permit.OutOfTurn]
)

// part is a member's part of a grant.
type part struct {
	taken bool
	place permit.Place
	terms *permit.Terms
	at    int64 // of the decision, by the store's clock
	due   int64 // by the limiter's clock
	spent int64 // the time of the bucket that it takes
}

// refund returns a refund of n permits, which are all of the part.
func (p *part) refund(n int64, how attempt) permit.Refund {
	r := p.place.Refund(p.terms, 0)
	if how == outOfTurn && r.Spent < float64(n) {
		return permit.OutOfTurn(p.place.Epoch, p.place.Version, p.place.ID, n, p.place.After, p.place.Returned)
	}
	r.Permits = n
	return r
}

// ahead returns how much of the bucket's future time the part takes.
func (p *part) ahead(now int64) int64 { return max(0, min(p.spent, p.due-now)) }

// refund is a part of a grant on its way back to its member.
type refund struct {
	grant *grant
	give  permit.Refund
}

// spare is grants without a call, in the order of their due times.
type spare []*grant

// add adds a grant.
func (s *spare) add(g *grant) {
	i := len(*s)
	for i > 0 && (*s)[i-1].due > g.due {
		i--
	}
	*s = slices.Insert(*s, i, g)
}

// take removes the first grant that a call can use and that is due by a time; nil if there is none. Permits that were due before the call came lapse.
func (s *spare) take(q *Call, by int64) *grant {
	for i, g := range *s {
		if q.permits == g.permits && q.came <= g.due && g.due <= min(q.until, by) {
			*s = slices.Delete(*s, i, i+1)
			return g
		}
	}
	return nil
}

// confirm lets a caller wait for the replies to its refunds.
type confirm struct {
	open bool
	err  error
	done chan struct{}
}

// await has the caller wait for the refunds of a grant. It returns c, which is nil if none waits.
func (c *confirm) await() *confirm {
	if c != nil {
		c.open = true
	}
	return c
}

// confirmed ends the wait for the refunds of a grant: they are decided, or it is not given back now.
func (g *grant) confirmed() {
	if c := g.confirm; c != nil {
		c.open = false
		close(c.done)
	}
	g.confirm = nil
}

// replied notes the reply to a refund.
func (c *confirm) replied(err error) {
	if c != nil && err != nil {
		c.err = err
	}
}

// wait waits for the replies to refunds, but not for longer than the store timeout. The participant's mu must not be held.
func (c *confirm) wait(ctx context.Context, config *Config) error {
	timeout := time.NewTimer(max(config.Timeout, time.Second))
	defer timeout.Stop()
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return ctx.Err()
	case <-timeout.C:
		return config.Failure(config.awaited(nil), fmt.Errorf("%w: cancel was not answered within %v", permit.ErrStoreTimeout, config.Timeout))
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

// origin returns the origin of a member's permits. Those of no grant have none.
func (g *grant) origin(m int) permit.Origin {
	if g == nil {
		return permit.Origin{}
	}
	return g.parts[m].place.Origin()
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

// split moves one part to a grant of its own.
func (g *grant) split(m int) *grant {
	one := &grant{permits: g.permits, parts: make([]part, len(g.parts))}
	one.parts[m], g.parts[m] = g.parts[m], part{}
	return one
}

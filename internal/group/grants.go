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

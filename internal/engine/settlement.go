package engine

import "github.com/go-tokenbucket/tokenbucket/internal/permit"

// Limiter returns the limiter of a call.
func (q *Call) Limiter() *Limiter { return q.limiter }

// Origin returns the origin of the permits of a granted call.
func (c *Coordinator) Origin(q *Call) permit.Origin {
	c.mu.Lock()
	defer c.mu.Unlock()
	return q.Origin
}

// Left reports whether the caller of a call has given it up, so that its permits go back.
func (c *Coordinator) Left(q *Call) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return q.state == left
}

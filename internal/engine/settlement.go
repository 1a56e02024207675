package engine

// Limiter returns the limiter of a call.
func (q *Call) Limiter() *Limiter { return q.limiter }

// Left reports whether the caller of a call has given it up, so that its permits go back.
func (c *Coordinator) Left(q *Call) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return q.state == left
}

package registry

import tokenbucket "github.com/go-tokenbucket/tokenbucket"

// Check tells why no Registry would put the limit in force, by a *RowError; nil if there is no reason. What a Registry adds of its own,
// such as limiter options, it does not know.
func (c *Limit) Check() error {
	if err := c.check(); err != nil {
		return err
	}
	if c.Disabled {
		return nil
	}
	sample, s := *c, settings{store: tokenbucket.NewMemoryStore()}
	if sample.Rate == 0 {
		sample.Rate = 1
	}
	if _, err := s.limiter(&sample, c.Version); err != nil {
		return &RowError{Row: c.Row, Name: c.Name, Err: err}
	}
	return nil
}

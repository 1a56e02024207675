package registry

import tokenbucket "github.com/go-tokenbucket/tokenbucket"

// Check tells why a Registry without limiter options would reject the limit, by a *RowError; nil if it would not.
func (c *Limit) Check() error {
	s := settings{store: tokenbucket.NewMemoryStore()}
	if err := s.try(c, c.Version); err != nil {
		return err
	}
	return nil
}

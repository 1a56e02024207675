package registry

import tokenbucket "github.com/go-tokenbucket/tokenbucket"

// Check tells why no Registry would put the limit in force, by a *RowError; nil if there is no reason. What a Registry adds of its own,
// such as limiter options, it does not know.
func (c *Limit) Check() error {
	s := settings{store: tokenbucket.NewMemoryStore()}
	for _, opt := range []Option{WithLocalWindows(), WithLocalSemaphores()} {
		if err := opt(&s); err != nil {
			return err
		}
	}
	if err := s.try(c, c.Version); err != nil {
		return err
	}
	return nil
}

package registry

import tokenbucket "github.com/go-tokenbucket/tokenbucket"

// Check returns a *RowError if no Registry would put the limit in force, and nil otherwise. The options of a Registry, such as
// WithLimiterOptions, may reject further limits.
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

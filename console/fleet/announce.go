package fleet

import (
	"context"
	"encoding/json"
)

// Announce adds an event that no instance can notice, such as a penalty by a person. Its time is that of Redis.
func Announce(ctx context.Context, client Client, e Event, opts ...Option) error {
	s := newSettings(opts)
	if err := s.check(); err != nil {
		return err
	}
	e.shorten()
	text, err := json.Marshal(e)
	if err != nil {
		return err
	}
	_, err = announceScript.run(ctx, client, 1, s.eventsKey(), string(text))
	return err
}

package fleet

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"
)

// Client is the least that is needed of a client of go-redis: any of them will do.
type Client interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// Option configures a Reader or a Publisher.
type Option func(*settings)

type settings struct {
	prefix string
}

// WithKeyPrefix sets what the keys in Redis begin with. Default: tokenbucket:, as of limiters.
func WithKeyPrefix(p string) Option { return func(s *settings) { s.prefix = p } }

// Reader reads what Publishers have written. It may be used by many goroutines at once.
type Reader struct {
	client Client
	settings
}

// NewReader returns a Reader.
func NewReader(client Client, opts ...Option) *Reader {
	r := &Reader{client: client, settings: settings{prefix: "tokenbucket:"}}
	for _, o := range opts {
		o(&r.settings)
	}
	return r
}

var errLater = errors.New("fleet: not built yet")

// Snapshot reads what all instances have published last.
func (r *Reader) Snapshot(ctx context.Context) (*Snapshot, error) { return nil, errLater }

// History returns a point for each minute from then on, but not more than a day back, the present one included.
func (r *Reader) History(ctx context.Context, name string, from time.Time) ([]Point, error) {
	return nil, errLater
}

// Events returns what happened from then on, but not more than a day back, the oldest first.
func (r *Reader) Events(ctx context.Context, from time.Time) ([]Event, error) { return nil, errLater }

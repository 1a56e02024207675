package tokenbucket

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/instances"
	"github.com/go-tokenbucket/tokenbucket/internal/logger"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
)

// described is a Store that tells the engine what it can do beyond Apply. The stores of this module are, and so is a Store that
// embeds one of them, for it has their methods: see traitsOf.
type described interface{ describe() traits }

// traits is what the engine knows of a store. The zero value: nothing, as of most stores.
type traits struct {
	// self is the store that describes itself. One that embeds it has an Apply of its own.
	self Store
	// err tells that the store was made wrongly; its constructor returns no error.
	err error
	// decides is which clock the store decides by, as far as that is known.
	decides engine.Timing
	// outages are counted for all buckets of the store together; nil: for each by itself. oneServer keeps all buckets: they are away
	// together.
	outages   *outage.Group
	oneServer bool
	// parts keeps processes' parts of buckets while the store is away; nil: it brings none.
	parts *MemoryStore
	// probe finds out whether the store could serve a bucket, before the context's deadline if it can. nil: Apply does, with a
	// batch that asks for nothing.
	probe func(ctx context.Context, name string) error
	// join makes this process one of those that use the store and are counted; nil: nobody counts.
	join func() *instances.Member
	// busy is why the store cannot be asked for a bucket, if this process itself is the reason; nil: it never is.
	busy func(name string) error
	// used is called for each limiter with its store timeout; nil: it does not matter.
	used func(timeout time.Duration)
	// logger is for what join and used find wrong; nil: nothing is.
	logger *logger.Logger

	// memory and trips are ways past Apply. memory never blocks, so its batches need no goroutine of their own and no deadline;
	// trips take batches of several buckets at once, on the route of each. nil: there is only Apply.
	memory *MemoryStore
	trips  *engine.Trips
	route  func(name string) string
}

// traitsOf returns what the engine knows of a store. If a store embeds another, its own Apply gets every batch.
func traitsOf(s Store) traits {
	d, ok := s.(described)
	if !ok {
		return traits{}
	}
	t := d.describe()
	if t.self != s {
		t.memory, t.trips, t.route = nil, nil, nil
	}
	return t
}

package tokenbucket

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/engine"
	"github.com/go-tokenbucket/tokenbucket/internal/instances"
	"github.com/go-tokenbucket/tokenbucket/internal/logger"
	"github.com/go-tokenbucket/tokenbucket/internal/outage"
)

// described is a Store that describes to the engine what it can do beyond Apply. The stores of this module implement it. So does a Store
// that embeds one of them, since it has their methods: see traitsOf.
type described interface{ describe() traits }

// traits describes a store to the engine. The zero value describes nothing, as for most stores.
type traits struct {
	// self is the store that describes itself. One that embeds it has an Apply of its own.
	self Store
	// err is the error of an invalid store; its constructor returns none.
	err error
	// decides is the clock that the store decides by, as far as that is known.
	decides engine.Timing
	// outages are counted for all buckets of the store together; if nil, for each bucket by itself. oneServer reports that one server keeps
	// all buckets, which then share its outages.
	outages   *outage.Group
	oneServer bool
	// parts keeps the local shares of buckets during outages; nil if the store has none.
	parts *MemoryStore
	// probe checks whether the store can serve a bucket, before the context's deadline if possible. If nil, Apply checks it, with a batch
	// without requests.
	probe func(ctx context.Context, name string) error
	// join counts this process among the instances that use the store; nil if the store does not count them.
	join func() *instances.Member
	// busy returns why this process itself prevents requests to a bucket, or nil; the function is nil if that cannot happen.
	busy func(name string) error
	// used is called for each limiter with its store timeout; nil if the store does not need it.
	used func(timeout time.Duration)
	// slot returns the part of a bucket's name that decides on which server it is; the same for buckets that one step may decide. Nil if one step
	// may decide all buckets.
	slot func(name string) string
	// bounded reports that Apply returns at its context's deadline, whatever the client does.
	bounded bool
	// logger receives the warnings of join and used; nil if there are none.
	logger *logger.Logger

	// memory and trips are paths that bypass Apply; nil if there is only Apply. memory never blocks, so its batches need no goroutine of
	// their own and no deadline. trips take batches of several buckets at once, on the route of each.
	memory *MemoryStore
	trips  *engine.Trips
	route  func(name string) string
}

// traitsOf returns the traits of a store. If a store embeds another, its own Apply gets every batch.
func traitsOf(s Store) traits {
	d, ok := s.(described)
	if !ok {
		return traits{}
	}
	t := d.describe()
	if t.self != s {
		t.memory, t.trips, t.route, t.bounded = nil, nil, nil, false
	}
	return t
}

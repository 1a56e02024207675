package console

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// Source is where the console's figures come from: a *fleet.Reader, or a stand-in. An error means that nothing is known now, and
// its text is shown. All contexts have a deadline. The methods may be called by several goroutines at once.
type Source interface {
	// Snapshot is how the fleet is now. It is asked once in a beat, however many look.
	Snapshot(ctx context.Context) (*fleet.Snapshot, error)
	// History is what became of a limit's calls, a point for each minute from then on.
	History(ctx context.Context, name string, from time.Time) ([]fleet.Point, error)
	// Events are what happened from then on, the oldest first.
	Events(ctx context.Context, from time.Time) ([]fleet.Event, error)
}

// Buckets is what a Source may also be: it shows a bucket as it is stored.
type Buckets interface {
	// Bucket returns the key of a bucket, and its fields in their order; none if it is not in use.
	Bucket(ctx context.Context, name string) (key string, fields [][2]string, err error)
}

package console

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// Source provides the console's figures: a *fleet.Reader, or a stand-in. The text of an error is shown on the pages. All
// contexts have a deadline. The methods may be called concurrently.
type Source interface {
	// Snapshot returns the present state of the fleet. It is called once per beat, whatever the number of viewers.
	Snapshot(ctx context.Context) (*fleet.Snapshot, error)
	// History returns the outcome of a limit's calls since from, a point for each minute.
	History(ctx context.Context, name string, from time.Time) ([]fleet.Point, error)
	// Events returns the events since from, the oldest first.
	Events(ctx context.Context, from time.Time) ([]fleet.Event, error)
}

// Buckets is an optional interface of a Source that can show a bucket as it is stored.
type Buckets interface {
	// Bucket returns the key of a bucket, and its fields in their order; no fields if the bucket does not exist.
	Bucket(ctx context.Context, name string) (key string, fields [][2]string, err error)
}

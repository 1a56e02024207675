package console

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket/console/fleet"
)

// Beat makes a view of two snapshots, and encodes its frame.
func Beat(past, now *fleet.Snapshot) {
	b := newBoard(nil, nil, time.Second)
	v := newView(past, now)
	_, whole := b.frames(v)
	whole()
}

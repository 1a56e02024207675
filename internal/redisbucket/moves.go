package redisbucket

import (
	"context"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// While a slot of a cluster moves, the source serves the keys that it still has, and redirects a command whose keys it does not have to the
// target (ASK). It refuses a command with some of both (TRYAGAIN), for the whole move if a key does not exist at all. That is the case of most
// locks. So a script that is refused declares fewer keys:
//
//   - The key of the bucket alone. One key is never refused: the bucket is at the source, or it is served at the target. The script reads the
//     lock without declaring it. It honours a lock that is on the same server, and cannot see one on the other server. Such a lock protects
//     nothing: its holder commits in a script that declares both keys, so not before both are on one server, and that script writes only if the
//     bucket still has the state that the holder has read. So every decision is exact, as that of lua/exchange.lua is. What is lost is the
//     turn that a lock is.
//   - Of a group the buckets that exist. Those that do not exist are not at the source, which cannot make a key while its slot moves away.
//     So they are new if the script runs at the target, and the script makes them there. At the source it refuses.
//
// Nothing else can be served: a group of which one bucket has moved and another has not. It waits.
//
// Not all servers allow a script to read a key that it does not declare. Those that do not never reply TRYAGAIN.

// movesFor is how long a slot counts as moving after a server has refused the keys of a bucket. A script that declares the bucket's key alone is
// right in any slot, so it may be longer than the move.
const movesFor = time.Second

// moves reports whether the slot of the bucket moves.
func (m *Session) moves() bool { return m.movesUntil != 0 && clock.Mono() < m.movesUntil }

// apart reports whether an error means that the bucket's key and its lock are not on one server. From then on the slot counts as moving.
func (m *Session) apart(err error) bool {
	if !script.KeysApart(err) {
		return false
	}
	m.movesUntil = clock.Mono() + movesFor
	return true
}

// declared appends the keys that a script on the bucket declares.
func (m *Session) declared(args []string) []string {
	if m.moves() {
		return append(args, m.bucket)
	}
	return append(args, m.bucket, m.lock)
}

// existing returns the keys that exist, but one at least.
func (s *Store) existing(ctx context.Context, keys []string) ([]string, error) {
	var lookups []script.Lookup
	for _, key := range keys {
		lookups = append(lookups, script.Lookup{Key: key, Command: "PTTL", Missing: "-2"})
	}
	found, err := script.Existing(ctx, s.client, lookups)
	return found, s.poolError(keys[0], err)
}

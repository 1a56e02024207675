package script

import (
	"context"
	"fmt"
)

var existingScript = New("return {tostring(redis.call(ARGV[1], KEYS[1]))}")

// Lookup finds out whether a key exists.
type Lookup struct {
	Key     string
	Command string // with the key as its only argument
	Missing string // its reply if the key does not exist
}

// Existing returns those keys that exist; if none does, the first one. Each is looked up by itself: then a cluster replies also while the slot of the
// keys moves, from the server that has the key. It is looked up by a script, because a client may read from a replica, which may be late.
func Existing(ctx context.Context, client Client, lookups []Lookup) (keys []string, _ error) {
	for _, l := range lookups {
		reply, err := existingScript.Run(ctx, client, 1, l.Key, l.Command)
		switch {
		case err != nil:
			return nil, err
		case len(reply) != 1:
			return nil, fmt.Errorf("key %q: unexpected reply %.80q", l.Key, reply)
		case reply[0] != l.Missing:
			keys = append(keys, l.Key)
		}
	}
	if len(keys) == 0 {
		keys = append(keys, lookups[0].Key)
	}
	return keys, nil
}

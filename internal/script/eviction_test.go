package script_test

import (
	"context"
	"errors"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// informant is a client of a server that returns one reply to every command.
type informant struct {
	reply string
	err   error
}

func (c informant) Process(_ context.Context, cmd redis.Cmder) error {
	cmd.(script.Once).SetVal(c.reply)
	cmd.SetErr(c.err)
	return c.err
}

func TestAskEviction(t *testing.T) {
	info := func(memory, policy string) informant {
		return informant{reply: "# Memory\r\nused_memory:1\r\nmaxmemory:" + memory + "\r\nmaxmemory_human:x\r\nmaxmemory_policy:" + policy + "\r\n"}
	}
	for name, test := range map[string]struct {
		server informant
		evicts bool
	}{
		"any key":              {info("1000", "allkeys-lru"), true},
		"keys that expire":     {info("1000", "volatile-ttl"), true},
		"no key":               {info("1000", "noeviction"), false},
		"no limit":             {info("0", "allkeys-lru"), false},
		"another server":       {informant{reply: "# Memory\r\nused_memory:1\r\n"}, false},
		"an empty reply":       {informant{}, false},
		"the user may not ask": {informant{err: errors.New("NOPERM this user has no permissions to run the 'info' command")}, false},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, test.evicts, script.AskEviction(t.Context(), test.server).Evicts())
		})
	}
}

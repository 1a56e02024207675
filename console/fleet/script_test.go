package fleet

import (
	"errors"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

type reply string

func (r reply) Error() string { return string(r) }
func (reply) RedisError()     {}

var _ redis.Error = reply("")

// A Publisher warns about what an operator must repair, and not about a server that is away or starting.
func TestRefused(t *testing.T) {
	for _, text := range []string{
		"NOPERM this user has no permissions to run the 'evalsha' command", "WRONGPASS invalid username-password pair", "NOAUTH Authentication required.",
		"WRONGTYPE Operation against a key holding the wrong kind of value", "ERR unknown command 'evalsha'",
	} {
		require.True(t, refused(reply(text)), text)
	}
	for _, text := range []string{
		"LOADING Redis is loading the dataset in memory", "READONLY You can't write against a read only replica.", "OOM command not allowed",
		"ERR max number of clients reached", "ERR MISCONF Redis is configured to save RDB snapshots",
		"ERR Error running script (call to f_1): @user_script:34: @user_script: 34: -READONLY You can't write against a read only replica.",
	} {
		require.False(t, refused(reply(text)), text)
	}
	require.False(t, refused(errors.New("dial tcp 127.0.0.1:6379: connect: connection refused")))
}

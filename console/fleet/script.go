package fleet

import (
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/redis/go-redis/v9"
)

// script is a Lua script and the hash that Redis caches it under.
type script struct {
	source, hash string
	once         bool // must not be repeated if the reply is lost
}

func newScript(source string) script {
	return script{source: source, hash: redis.NewScript(source).Hash()}
}

// onceCmd is a command that a client of go-redis does not retry.
type onceCmd struct{ *redis.StringSliceCmd }

// NoRetry implements redis.Cmder.
func (onceCmd) NoRetry() bool { return true }

// Clone implements redis.Cmder.
func (c onceCmd) Clone() redis.Cmder {
	return onceCmd{c.StringSliceCmd.Clone().(*redis.StringSliceCmd)}
}

// run calls the script by its hash, and sends its source if Redis does not have it. The first keys of args are KEYS.
func (s *script) run(ctx context.Context, client Client, keys int, args ...string) ([]string, error) {
	send := func(command, text string) ([]string, error) {
		all := []any{command, text, keys}
		for _, a := range args {
			all = append(all, a)
		}
		cmd := redis.NewStringSliceCmd(ctx, all...)
		var sent redis.Cmder = cmd
		if s.once {
			sent = onceCmd{cmd}
		}
		if err := client.Process(ctx, sent); err != nil {
			return nil, err
		}
		return cmd.Result()
	}
	reply, err := send("evalsha", s.hash)
	if redis.HasErrorPrefix(err, "NOSCRIPT") {
		return send("eval", s.source)
	}
	return reply, err
}

// transient are the codes of replies that go away without an operator: the server is loading, failing over, busy or out of
// memory.
var transient = []string{
	"LOADING", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "NOREPLICAS", "OOM", "MISCONF", "BUSY", "UNKILLABLE", "max number of clients",
}

// refused reports whether Redis replied with an error that an operator must repair, such as a missing right. Redis 6 puts the
// location in the script before the code: "ERR Error running script …: -OOM …".
func refused(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply) && !slices.ContainsFunc(transient, func(code string) bool {
		return redis.HasErrorPrefix(reply, code) || strings.Contains(reply.Error(), ": -"+code)
	})
}

// Package script runs Lua scripts on Redis: once each, though clients send again what was not answered.
package script

import (
	"context"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Client is the least that is needed of a client of go-redis.
type Client interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// Script is a script and the hash that Redis knows it by.
type Script struct{ Source, SHA string }

// New returns a script.
func New(source string) Script { return Script{source, redis.NewScript(source).Hash()} }

// Call is a command that must not be sent twice, whose reply is a list of strings. With its default options go-redis sends
// a script whose reply was lost up to four times: it would take permits four times.
type Call struct{ *redis.StringSliceCmd }

// NoRetry implements redis.Cmder.
func (Call) NoRetry() bool { return true }

// Clone implements redis.Cmder: a copy must not be sent twice either.
func (c Call) Clone() redis.Cmder { return Call{c.StringSliceCmd.Clone().(*redis.StringSliceCmd)} }

// Call is a call of the script by its hash, or with its source. Its keys are the first of the arguments.
func (s *Script) Call(ctx context.Context, source bool, keys int, args []string) Call {
	all := make([]any, 3, 3+len(args))
	all[0], all[1], all[2] = "evalsha", s.SHA, keys
	if source {
		all[0], all[1] = "eval", s.Source
	}
	for i := range args {
		all = append(all, &args[i]) // a pointer costs no allocation
	}
	cmd := redis.NewStringSliceCmd(ctx, all...)
	cmd.SetFirstKeyPos(3)
	return Call{cmd}
}

// Run runs the script once; its keys are the first of the arguments. Only what Redis says it has not executed is sent
// again, until the context's deadline.
func (s *Script) Run(ctx context.Context, client Client, keys int, args ...string) ([]string, error) {
	source := false
	for pause := NewPause(); ; {
		cmd := s.Call(ctx, source, keys, args)
		err := client.Process(ctx, cmd)
		if err == nil {
			err = cmd.Err()
		}
		switch {
		case err == nil:
			return cmd.Val(), nil
		case redis.HasErrorPrefix(err, "NOSCRIPT") && !source:
			source = true
		case !NotExecuted(err) || !pause.Wait(ctx):
			return nil, err
		}
	}
}

// CannotServe tells whether a reply of Redis says that the server cannot serve now.
func CannotServe(reply string) bool {
	for _, prefix := range []string{
		"LOADING", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "NOREPLICAS", "OOM", "MISCONF", "BUSY", "UNKILLABLE",
		"ERR max number of clients",
	} {
		if strings.HasPrefix(reply, prefix) {
			return true
		}
	}
	return false
}

// NotExecuted tells whether Redis refused a command without running any of it.
func NotExecuted(err error) bool {
	for _, prefix := range []string{"LOADING", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "NOREPLICAS"} {
		if redis.HasErrorPrefix(err, prefix) {
			return true
		}
	}
	return false
}

// Pause grows from 0.2 ms to 10 ms, each with jitter, so that a fleet does not knock in step.
type Pause time.Duration

// NewPause returns the shortest.
func NewPause() *Pause {
	p := Pause(200 * time.Microsecond)
	return &p
}

// Wait reports false if the context ends first.
func (p *Pause) Wait(ctx context.Context) bool {
	d := time.Duration(*p)
	*p = Pause(min(2*d, 10*time.Millisecond))
	timer := time.NewTimer(d/2 + rand.N(d))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// EncodeName escapes what could leave the braces of a key or disturb a person's terminal, and the escape itself, as in URLs.
func EncodeName(name string) string {
	const hex = "0123456789ABCDEF"
	plain := func(c byte) bool { return c > ' ' && c != '%' && c != '{' && c != '}' && c != 0x7f }
	var b strings.Builder
	for i := range len(name) {
		if c := name[i]; plain(c) {
			b.WriteByte(c)
		} else {
			b.WriteByte('%')
			b.WriteByte(hex[c>>4])
			b.WriteByte(hex[c&15])
		}
	}
	return b.String()
}

// Package script runs Lua scripts on Redis: once each, though clients send again what was not answered.
package script

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"
)

// Client is the least that is needed of a client of go-redis.
type Client interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// HeedsDeadline tells that every call of a client returns at its context's deadline at the latest. One of a single server does so with
// ContextTimeoutEnabled; others read for as long as their ReadTimeout. (A copy with another ReadTimeout would lose the hooks: see
// redis.Client.WithTimeout.)
func HeedsDeadline(client Client) bool {
	c, ok := client.(*redis.Client)
	return ok && c.Options().ContextTimeoutEnabled
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
			Reload(ctx, client, err)
			return nil, err
		}
	}
}

// Reload has a cluster's client look anew where the keys are, after a connection has failed: of a command that must not be sent
// twice it does not do so by itself, and would ask a server that has died for a minute. Run does it; who sends a Call must.
func Reload(ctx context.Context, client Client, err error) {
	var reply redis.Error
	if err == nil || errors.As(err, &reply) {
		return
	}
	if c, ok := client.(interface{ ReloadState(context.Context) }); ok {
		c.ReloadState(ctx)
	}
}

// notNow is how replies begin that refuse a command for the state the server is in, before any of it is run.
var notNow = []string{"LOADING", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "NOREPLICAS"}

// CannotServe tells whether a reply of Redis says that the server cannot serve now.
func CannotServe(reply string) bool {
	reply = refusal(reply)
	return begins(reply, notNow) || begins(reply, []string{"OOM", "MISCONF", "BUSY", "UNKILLABLE", "max number of clients"})
}

// NotExecuted tells whether Redis refused a command without running any of it, so that it may be sent again.
//
// Of a script that is true although reads before the refused command were run: READONLY and NOREPLICAS refuse its first
// write or none, since a server does not change its role while a script runs. (Redis before 7.0.3 can refuse a later one
// with NOREPLICAS, but only of a script that has run for seconds.) So it holds for every script whose effects are all
// writes.
func NotExecuted(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply) && begins(refusal(reply.Error()), notNow)
}

func begins(s string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(s, p) })
}

// refusal is a reply from its code on. Before Redis 7 a command refused in a script is told with its places, once by
// redis.pcall and twice by redis.call:
//
//	@user_script: 34: -READONLY You can't write against a read only replica.
//	ERR Error running script (call to f_…): @user_script:34: @user_script: 34: -READONLY You can't …
//
// What a script says itself begins otherwise: an excerpt of a key in it is no refusal, whatever it holds.
func refusal(reply string) string {
	reply = strings.TrimPrefix(reply, "ERR ") // KVRocks has it before every code
	if strings.HasPrefix(reply, "@user_script") || strings.HasPrefix(reply, "Error running script (call to ") {
		at := max(0, strings.LastIndex(reply, "@user_script"))
		if _, code, ok := strings.Cut(reply[at:], ": -"); ok {
			return code
		}
	}
	return reply
}

// Pause grows from 0.2 ms to 10 ms, each with jitter, so that a fleet does not ask at the same times.
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
	return Sleep(ctx, d/2+rand.N(d))
}

// Sleep reports false if the context ends first, and at once if its deadline is sooner: so there is time to tell why.
func Sleep(ctx context.Context, d time.Duration) bool {
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) <= d {
		return false
	}
	timer := time.NewTimer(d)
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
	n := 0
	for n < len(name) && plain(name[n]) {
		n++
	}
	if n == len(name) {
		return name
	}
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

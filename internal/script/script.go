// Package script runs Lua scripts on Redis at most once per call, although clients retry commands without a reply.
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

// Client is the part of a go-redis client that scripts need.
type Client interface {
	Process(ctx context.Context, cmd redis.Cmder) error
}

// Script is a script and its hash, by which Redis caches it.
type Script struct{ Source, SHA string }

// New returns a script.
func New(source string) Script {
	s := Script{source, redis.NewScript(source).Hash()}
	sources.Store(s.SHA, source)
	return s
}

// Call is a command with a list of strings as reply, which the client must not retry. By default, go-redis sends a command whose reply was
// lost up to four times. A script would take its permits four times.
type Call struct{ *redis.StringSliceCmd }

// NoRetry implements redis.Cmder.
func (Call) NoRetry() bool { return true }

// Clone implements redis.Cmder. A copy must not be retried either.
func (c Call) Clone() redis.Cmder { return Call{c.StringSliceCmd.Clone().(*redis.StringSliceCmd)} }

// Call returns a call of the script by its hash, or with its source. The keys are the first of the arguments.
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

// Run runs the script at most once. The keys are the first of the arguments. Until the context's deadline, Run retries calls that Redis
// reports it has not executed, and no others.
func (s *Script) Run(ctx context.Context, client Client, keys int, args ...string) ([]string, error) {
	return s.run(ctx, client, NotExecuted, keys, args)
}

// RunTogether is Run, except that it returns at once if the keys are apart (see [KeysApart]). The caller can do with fewer keys.
func (s *Script) RunTogether(ctx context.Context, client Client, keys int, args ...string) ([]string, error) {
	return s.run(ctx, client, func(err error) bool { return NotExecuted(err) && !KeysApart(err) }, keys, args)
}

func (s *Script) run(ctx context.Context, client Client, again func(error) bool, keys int, args []string) ([]string, error) {
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
		case !again(err) || !pause.Wait(ctx):
			Reload(ctx, client, err)
			return nil, err
		}
	}
}

// Reload makes a cluster's client reload the slots after a connection has failed. For commands without retries the client does not do so
// itself, so it would use a dead server for a minute. Run calls Reload; other senders of a Call must do so too.
func Reload(ctx context.Context, client Client, err error) {
	var reply redis.Error
	if err == nil || errors.As(err, &reply) {
		return
	}
	if c, ok := client.(interface{ ReloadState(context.Context) }); ok {
		c.ReloadState(ctx)
	}
}

// Locate makes a cluster's client find the server of a key again, after its server did not reply. A wrapper may hide the client's
// ReloadState, and the client then reloads its slots only when it is redirected. So Locate sends a read of the key to a random server, by
// declaring its last argument to be the key: that server redirects it. Locate takes a second at most.
func Locate(client Client, key string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	if c, ok := client.(interface{ ReloadState(context.Context) }); ok {
		c.ReloadState(ctx)
		return
	}
	cmd := redis.NewCmd(ctx, "getrange", key, 0, rand.IntN(1000))
	cmd.SetFirstKeyPos(3)
	_ = client.Process(ctx, Once{Cmd: cmd})
}

// Once is a command with any reply, which the client must not retry. See Call.
type Once struct{ *redis.Cmd }

// NoRetry implements redis.Cmder.
func (Once) NoRetry() bool { return true }

// Clone implements redis.Cmder. A copy must not be retried either.
func (c Once) Clone() redis.Cmder { return Once{c.Cmd.Clone().(*redis.Cmd)} }

// notNow are the prefixes of replies that refuse a command because of the state of the server, before any of it is executed.
var notNow = []string{"LOADING", "READONLY", "CLUSTERDOWN", "TRYAGAIN", "MASTERDOWN", "NOREPLICAS"}

// CannotServe reports whether a reply means that the server cannot serve now.
func CannotServe(reply string) bool {
	reply = refusal(reply)
	return begins(reply, notNow) || begins(reply, []string{"OOM", "MISCONF", "BUSY", "UNKILLABLE", "max number of clients"})
}

// NotExecuted reports whether Redis refused a command without executing any of it, so that it may be sent again.
//
// A script may have executed reads before the refused command. READONLY and NOREPLICAS refuse its first write or none, because a server
// does not change its role while a script runs. So NotExecuted is correct for every script whose effects are all writes. (Redis before 7.0.3
// can refuse a later write with NOREPLICAS, but only after the script has run for seconds.)
func NotExecuted(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply) && begins(refusal(reply.Error()), notNow)
}

// KeysApart reports whether a server of a cluster refused a command because its slot moves to another server, and some of the command's keys are not
// here: they have moved, or do not exist. A command with one key is never refused for that. The source serves it if the key exists there, and
// otherwise redirects it to the target.
func KeysApart(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply) && strings.HasPrefix(refusal(reply.Error()), "TRYAGAIN")
}

// begins reports whether s begins with one of the prefixes.
func begins(s string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(s, p) })
}

// refusal returns a reply without the text before its error code. Before Redis 7, the error of a command in a script begins with its
// location, once for redis.pcall and twice for redis.call:
//
//	@user_script: 34: -READONLY You can't write against a read only replica.
//	ERR Error running script (call to f_…): @user_script:34: @user_script: 34: -READONLY You can't …
//
// Errors that a script returns itself begin differently. So an excerpt of a key in them is never taken for a refusal.
func refusal(reply string) string {
	reply = strings.TrimPrefix(reply, "ERR ") // KVRocks puts it before every code
	if strings.HasPrefix(reply, "@user_script") || strings.HasPrefix(reply, "Error running script (call to ") {
		at := max(0, strings.LastIndex(reply, "@user_script"))
		if _, code, ok := strings.Cut(reply[at:], ": -"); ok {
			return code
		}
	}
	return reply
}

// Pause is a pause between retries that doubles from 0.2 ms to 10 ms. Jitter keeps the processes of a fleet apart.
type Pause time.Duration

// NewPause returns the shortest pause.
func NewPause() *Pause {
	p := Pause(200 * time.Microsecond)
	return &p
}

// Wait waits for the pause and doubles it. It reports false if the context ends first.
func (p *Pause) Wait(ctx context.Context) bool {
	d := time.Duration(*p)
	*p = Pause(min(2*d, 10*time.Millisecond))
	return Sleep(ctx, d/2+rand.N(d))
}

// Sleep waits for d. It reports false if the context ends first. If the context's deadline is sooner, it does so at once, which leaves the
// caller time to return the cause.
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

// EncodeName escapes a name for use within the braces of a key, as in URLs. It escapes braces, control characters, spaces and the percent
// sign.
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

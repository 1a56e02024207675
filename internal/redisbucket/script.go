package redisbucket

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// attempt is one batch on its way through lua/apply.lua.
type attempt struct {
	batch     *permit.Batch
	session   *Session
	scratch   *scratch
	predicted bool // it was sent with scratch.prediction
}

// The status of a bucket in a reply of lua/apply.lua.
type status int

const (
	decided status = iota
	late
	locked
	wrong  // the prediction was wrong, and nothing was written
	notNow // Redis cannot serve now, and nothing was written
)

// commandError is the error of a command inside a script.
type commandError string

func (r commandError) Error() string { return string(r) }

// RedisError implements redis.Error.
func (commandError) RedisError() {}

// Numbers of arguments of lua/apply.lua: for all buckets together, and for each bucket.
const (
	headArgs   = 4
	bucketArgs = 2
)

// minUnchanged is the number of batches in a row that must have found the remembered state before a prediction is sent. A wrong one costs a
// round trip.
const minUnchanged = 3

// encode sets the arguments of a bucket. asOf is the time of a prediction; 0 if none may be made.
func (a *attempt) encode(args []string, asOf int64, deadline string) {
	if a.predicted = a.session.unchanged >= minUnchanged && a.session.predict(a.batch, asOf, a.scratch); a.predicted {
		args[0], args[1] = a.session.text, a.scratch.prediction.text
	} else {
		args[1] = encodeBatch(a.batch, deadline)
	}
}

// encodeBatch encodes a batch for lua/apply.lua. Equal requests in a row are sent as one with a count.
func encodeBatch(b *permit.Batch, deadline string) string {
	var buf [512]byte
	dst := buf[:0]
	dst = append(append(dst, b.Terms.Text...), '\n')
	if b.Known != nil && b.Known.Version > b.Terms.Version {
		dst = append(dst, b.Known.Text...)
	}
	dst = strconv.AppendInt(append(dst, '\n'), b.Epoch, 10)
	dst = permit.AppendFloat(append(dst, ' '), b.Initial)
	if b.Transient {
		dst = append(dst, " transient "...)
	} else {
		dst = append(dst, " lasting "...)
	}
	dst = append(append(dst, deadline...), '\n')
	ints := func(op string, ns ...int64) {
		dst = append(dst, op...)
		for _, n := range ns {
			dst = strconv.AppendInt(append(dst, ' '), n, 10)
		}
		dst = append(dst, ' ')
	}
	for i := 0; i < len(b.Requests); i++ {
		r := &b.Requests[i]
		switch r.Op {
		case permit.Take:
			n := int64(1)
			for ; i+1 < len(b.Requests) && sameTake(&b.Requests[i+1], r); i++ {
				n++
			}
			ints("T", n, r.Permits, r.MaxWaitMicros)
		case permit.GiveBack:
			dst = appendRefund(dst, &r.Back)
		case permit.SetRate:
			dst = append(permit.AppendFloat(append(dst, "S "...), r.Rate), ' ')
		case permit.SetRateAndBurst:
			dst = append(permit.AppendFloat(append(dst, "B "...), r.Rate), ' ')
			dst = append(permit.AppendFloat(dst, r.MaxPermits), ' ')
		case permit.TakeStored:
			ints("L", r.Permits)
		case permit.Hold:
			ints("H", r.HoldMicros)
		case permit.Settle:
			ints("A", r.Permits, r.Origin.Epoch, r.Origin.ID)
		case permit.Reset:
			dst = append(dst, "R "...)
		case permit.ResetQuota:
			dst = append(dst, "Q "...)
		}
	}
	return string(dst)
}

// appendRefund encodes a refund for lua/apply.lua.
func appendRefund(dst []byte, g *permit.Refund) []byte {
	dst = append(dst, "G "...)
	for _, n := range []int64{g.Epoch, g.Tag, g.Tail, g.Version, g.ID} {
		dst = append(strconv.AppendInt(dst, n, 10), ' ')
	}
	dst = append(permit.AppendFloat(dst, g.To.Stored), ' ')
	dst = append(strconv.AppendInt(dst, g.To.Next, 10), ' ')
	dst = append(permit.AppendFloat(dst, g.To.Carry), ' ')
	dst = append(strconv.AppendInt(dst, g.End, 10), ' ')
	dst = append(permit.AppendFloat(dst, g.Spent), ' ')
	return append(permit.AppendFloat(dst, g.Level), ' ')
}

func sameTake(r, o *permit.Request) bool {
	return r.Op == o.Op && r.Permits == o.Permits && r.MaxWaitMicros == o.MaxWaitMicros
}

// decode decodes the part of a reply that belongs to a bucket, and completes the batch's outcome. clock is the time in the reply.
func (a *attempt) decode(clock int64, answer string) (status, error) {
	m := a.session
	if a.predicted && answer == "" {
		m.confirmed(a.scratch, &a.batch.Outcome)
		a.batch.Outcome.ClockMicros = clock
		return decided, nil
	}
	word, rest, _ := strings.Cut(answer, " ")
	switch {
	case strings.HasPrefix(answer, "decided\n"):
		return decided, a.replay(clock, answer[len("decided\n"):])
	case word == "late":
		return late, nil
	case word == "locked":
		return locked, nil
	case word == "wrong":
		m.unchanged = 0
		return wrong, nil
	}
	m.text = ""
	switch {
	case word == "corrupt":
		err := a.scratch.left.Parse(rest, nil)
		if err == nil {
			err = fmt.Errorf("%.80q", rest)
		}
		return decided, corruptKey(m.bucket, err)
	case word == "error" && strings.HasPrefix(rest, "WRONGTYPE"):
		return decided, wrongType(m.bucket)
	case word == "error":
		err := fmt.Errorf("key %q: redis: %w", m.bucket, commandError(rest))
		if script.NotExecuted(err) {
			return notNow, err
		}
		return decided, err
	}
	return decided, fmt.Errorf("key %q: unexpected reply %.80q", m.bucket, answer)
}

// replay decides the batch on the state that the script found. Both languages compute the same, so a reply contains no grants, however large
// the batch is. replay compares the resulting state with that of the script, and fails if they differ.
func (a *attempt) replay(clock int64, states string) error {
	m := a.session
	old, new, _ := strings.Cut(states, "\n")
	b := a.scratch.left
	if err := b.Parse(old, a.batch.Terms); err != nil {
		return corruptKey(m.bucket, err)
	}
	out := &a.batch.Outcome
	if err := b.Decide(clock, a.batch, out); err != nil {
		m.text = ""
		return err
	}
	var text []byte
	if out.Changed {
		text = a.scratch.text()
	}
	if string(text) != new {
		m.text = ""
		return fmt.Errorf("key %q: Redis decided %q, but this process computes %q from %q; please report this", m.bucket, new, text, old)
	}
	m.remember(old, a.batch, b, new)
	return nil
}

// micros returns a time as an argument: "" for 0, which is no time.
func micros(n int64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(n, 10)
}

// Decide decides a batch and stores the outcome in it. It waits until the context ends while another process holds the bucket's lock.
func (s *ScriptStore) Decide(ctx context.Context, batch *permit.Batch) error {
	return s.apply(ctx, batch, s.sessionOf(batch))
}

// apply runs the script until the batch is decided. It repeats it while the lock is held, and after a wrong prediction.
func (s *Store) apply(ctx context.Context, batch *permit.Batch, m *Session) error {
	w := s.scratches.Get().(*scratch)
	defer s.scratches.Put(w)
	a := &attempt{batch: batch, session: m, scratch: w}
	server := batch.Server()
	tooLate, waited := false, time.Duration(0)
	defer func() { a.batch.Outcome.LockWait = since(waited) }()
	for pause := script.NewPause(); ; {
		asked := clock.Mono()
		now, answer, err := s.sendOne(ctx, a, &server)
		if err != nil {
			if moved := m.moves(); m.apart(err) && (!moved || pause.Wait(ctx)) {
				continue
			}
			if waited != 0 && ctx.Err() != nil {
				err = fmt.Errorf("%w: key %q", permit.ErrLockNotObtained, a.session.lock)
			}
			return err
		}
		status, err := a.decode(now, answer)
		a.session.held.Store(status == locked)
		switch status {
		case late:
			if tooLate || ctx.Err() != nil { // the first time it may be the estimate of the server's clock that is wrong
				return s.tooLate(a.batch)
			}
			tooLate = true
			server.Heard(now, asked, clock.Mono())
		case wrong: // decode has reset unchanged, so the next call has no prediction
		case notNow:
			if !pause.Wait(ctx) {
				return err
			}
		case locked:
			if waited == 0 {
				waited = clock.Mono()
			}
			if !pause.Wait(ctx) {
				return fmt.Errorf("%w: key %q: held for %s ms more", permit.ErrLockNotObtained, a.session.lock, strings.TrimPrefix(answer, "locked "))
			}
		default:
			return err
		}
	}
}

// sendOne runs the script for one batch. It returns the server's time, and the part of the reply that belongs to the bucket.
func (s *Store) sendOne(ctx context.Context, a *attempt, server *clock.Remote) (now int64, answer string, err error) {
	var room [2 + headArgs + bucketArgs]string
	keys := len(a.session.declared(room[:0]))
	args := room[:keys+headArgs+bucketArgs]
	local := s.clockArg(a.batch)
	at := asOf(server)
	if s.local {
		at, _ = strconv.ParseInt(local, 10, 64)
	}
	deadline := s.deadlineArg(timeOf(ctx), server)
	s.head(args[keys:], local, at, deadline)
	a.encode(args[keys+headArgs:], at, deadline)
	reply, err := s.run(ctx, &ApplyScript, keys, args...)
	if err != nil {
		return 0, "", err
	}
	if now, err = parseReply(reply, 1); err != nil {
		return 0, "", err
	}
	return now, reply[1], nil
}

// since returns the time since clock.Mono was began; 0 if began is 0.
func since(began time.Duration) time.Duration {
	if began == 0 {
		return 0
	}
	return clock.Mono() - began
}

// head sets the arguments that all buckets of a call share.
func (s *Store) head(args []string, clock string, asOf int64, until string) {
	args[0], args[1], args[2], args[3] = clock, strconv.FormatInt(s.lockTTL.Milliseconds(), 10), micros(asOf), until
}

// parseReply returns the server's time in a reply of lua/apply.lua, which must have a part for each of the buckets.
func parseReply(reply []string, buckets int) (clock int64, err error) {
	if len(reply) == 1+buckets {
		if clock, err = strconv.ParseInt(reply[0], 10, 64); err == nil {
			return clock, nil
		}
	}
	return 0, fmt.Errorf("unexpected reply %.80q", reply)
}

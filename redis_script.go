package tokenbucket

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// attempt is one batch on its way through lua/apply.lua.
type attempt struct {
	batch      *batch
	cached     *cachedState
	prediction prediction
	predicted  bool
}

// The status of a bucket in a reply of lua/apply.lua.
type status int

const (
	decided status = iota
	late
	locked
	wrong  // the prediction was
	notNow // nothing was written; Redis says that it cannot now
)

// commandError is the error of a command inside a script. It is a failure, not the refusal of a permit.
type commandError string

func (r commandError) Error() string { return string(r) }

// RedisError implements redis.Error.
func (commandError) RedisError() {}

// arguments of lua/apply.lua: four for all buckets, two for each.
const (
	headArgs   = 4
	bucketArgs = 2
)

// minUnchanged is how many batches in a row must have found the cached state before a prediction is made: a wrong one costs a round trip.
const minUnchanged = 3

// encode writes the arguments that belong to a bucket. A prediction is made if asOf is not 0.
func (a *attempt) encode(args []string, asOf int64, deadline string) {
	if a.predicted = a.cached.unchanged >= minUnchanged && a.cached.predict(a.batch, asOf, &a.prediction); a.predicted {
		args[0], args[1] = beginning(a.cached.text), a.prediction.text
	} else {
		args[1] = encodeBatch(a.batch, deadline)
	}
}

// beginning is how a state begins: epoch and seq, which tell it from all others of its bucket, and as much more as costs
// Redis nothing (it keeps strings of up to 44 bytes in one piece).
func beginning(text string) string {
	return text[:max(strings.Index(text, " stored="), min(44, len(text)))]
}

// encodeBatch is a batch as lua/apply.lua reads it. Equal requests in a row travel as a count.
func encodeBatch(b *batch, deadline string) string {
	var buf [512]byte
	dst := buf[:0]
	if b.own != nil {
		dst = append(dst, b.own.text...)
	} else {
		dst = b.config.appendText(dst)
	}
	dst = append(dst, '\n')
	if b.Known.Version > b.config.Version {
		dst = b.Known.appendText(dst)
	}
	dst = strconv.AppendInt(append(dst, '\n'), b.Epoch, 10)
	dst = appendFloat(append(dst, ' '), b.Initial)
	dst = append(append(append(dst, ' '), deadline...), '\n')
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
		case opTake:
			n := int64(1)
			for ; i+1 < len(b.Requests) && b.Requests[i+1].sameTake(r); i++ {
				n++
			}
			ints("T", n, r.Permits, r.MaxWaitMicros)
		case opGiveBack:
			dst = r.Back.appendText(dst)
		case opSetRate:
			dst = append(appendFloat(append(dst, "S "...), r.Rate), ' ')
		case opSetRateAndBurst:
			dst = append(appendFloat(append(dst, "B "...), r.Rate), ' ')
			dst = append(appendFloat(dst, r.MaxPermits), ' ')
		case opTakeStored:
			ints("L", r.Permits)
		case opHold:
			ints("H", r.HoldMicros)
		case opReset:
			dst = append(dst, "R "...)
		}
	}
	return string(dst)
}

// appendText appends a refund as lua/apply.lua reads it.
func (g *giveBack) appendText(dst []byte) []byte {
	dst = append(dst, "G "...)
	for _, n := range []int64{g.Epoch, g.Tag, g.Tail, g.Version, g.ID} {
		dst = append(strconv.AppendInt(dst, n, 10), ' ')
	}
	dst = append(appendFloat(dst, g.to.Stored), ' ')
	dst = append(strconv.AppendInt(dst, g.to.Next, 10), ' ')
	dst = append(appendFloat(dst, g.to.Carry), ' ')
	dst = append(strconv.AppendInt(dst, g.end, 10), ' ')
	dst = append(appendFloat(dst, g.spent), ' ')
	dst = append(appendFloat(dst, g.level), ' ')
	return append(strconv.AppendInt(dst, g.granted, 10), ' ')
}

func (r *request) sameTake(o *request) bool {
	return r.Op == o.Op && r.Permits == o.Permits && r.MaxWaitMicros == o.MaxWaitMicros
}

// decode reads a bucket's answer at a time of the store's clock.
func (a *attempt) decode(clock int64, answer string) (status, error) {
	m := a.cached
	if a.predicted && answer == "" {
		m.confirmed(&a.prediction, &a.batch.out)
		a.batch.out.ClockMicros = clock
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
		err := new(PermitBucket).parse(rest, nil)
		if err == nil {
			err = fmt.Errorf("%.80q", rest)
		}
		return decided, corruptKey(m.bucket, err)
	case word == "error" && strings.HasPrefix(rest, "WRONGTYPE"):
		return decided, wrongType(m.bucket)
	case word == "error":
		err := fmt.Errorf("tokenbucket: key %q: redis: %w", m.bucket, commandError(rest))
		if script.NotExecuted(err) {
			return notNow, err
		}
		return decided, err
	}
	return decided, fmt.Errorf("tokenbucket: key %q: unexpected reply %.80q", m.bucket, answer)
}

// replay computes the script's answers from the state it started with: both languages compute the same, so a reply
// needs no grants in it, however large the batch. That they do is checked with every reply.
func (a *attempt) replay(clock int64, states string) error {
	m := a.cached
	old, new, _ := strings.Cut(states, "\n")
	var b PermitBucket
	if err := b.parse(old, a.batch.own); err != nil {
		return corruptKey(m.bucket, err)
	}
	found := b
	out := &a.batch.out
	if err := b.apply(clock, a.batch, out); err != nil {
		m.text = ""
		return err
	}
	var buf [256]byte
	text := buf[:0]
	if out.Changed {
		text = b.appendText(text)
	}
	if string(text) != new {
		m.text = ""
		return fmt.Errorf("tokenbucket: key %q: Redis decided %q, but this process computes %q from %q; please report this", m.bucket, new, text, old)
	}
	m.remember(old, &found, out, new)
	return nil
}

// micros is a time as an argument; 0: none.
func micros(n int64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(n, 10)
}

// decide implements decider.
func (s *RedisScriptStore) decide(ctx context.Context, batch *batch) error {
	return s.apply(ctx, &attempt{batch: batch, cached: s.cacheOf(batch)})
}

// apply asks until the batch is decided: while somebody holds the bucket's lock, and again if its prediction was wrong.
func (s *RedisScriptStore) apply(ctx context.Context, a *attempt) error {
	server := a.batch.server()
	tooLate, waited := false, time.Duration(0)
	defer func() { a.batch.out.lockWait = since(waited) }()
	for pause := script.NewPause(); ; {
		asked := clock.Mono()
		now, answer, err := s.sendOne(ctx, a, &server)
		if err != nil {
			if waited != 0 && ctx.Err() != nil {
				err = fmt.Errorf("%w: key %q", ErrLockNotObtained, a.cached.lock)
			}
			return err
		}
		status, err := a.decode(now, answer)
		a.cached.held.Store(status == locked)
		switch status {
		case late:
			if tooLate || ctx.Err() != nil { // once more with the right time: the server's clock may have stepped
				return s.tooLate(a.batch)
			}
			tooLate = true
			server.Heard(now, asked, clock.Mono())
		case wrong: // and not made again
		case notNow:
			if !pause.Wait(ctx) {
				return err
			}
		case locked:
			if waited == 0 {
				waited = clock.Mono()
			}
			if !pause.Wait(ctx) {
				return fmt.Errorf("%w: key %q: held for %s ms more", ErrLockNotObtained, a.cached.lock, strings.TrimPrefix(answer, "locked "))
			}
		default:
			return err
		}
	}
}

// sendOne takes one bucket's batch to Redis, and returns the time there and the answer.
func (s *RedisScriptStore) sendOne(ctx context.Context, a *attempt, server *clock.Remote) (now int64, answer string, err error) {
	var args [2 + headArgs + bucketArgs]string
	args[0], args[1] = a.cached.bucket, a.cached.lock
	local := s.clockArg(a.batch)
	at := asOf(server)
	if s.local {
		at, _ = strconv.ParseInt(local, 10, 64)
	}
	deadline := s.deadlineArg(timeOf(ctx), server)
	s.head(args[2:], local, at, deadline)
	a.encode(args[2+headArgs:], at, deadline)
	reply, err := s.run(ctx, &applyScript, 2, args[:]...)
	if err != nil {
		a.cached.text = ""
		return 0, "", err
	}
	if now, err = parseReply(reply, 1); err != nil {
		return 0, "", err
	}
	return now, reply[1], nil
}

// since is the time since a moment, by the monotonic clock; 0 if there was none.
func since(began time.Duration) time.Duration {
	if began == 0 {
		return 0
	}
	return clock.Mono() - began
}

// head writes the arguments that all buckets share.
func (s *redisBase) head(args []string, clock string, asOf int64, until string) {
	args[0], args[1], args[2], args[3] = clock, strconv.FormatInt(s.lockTTL.Milliseconds(), 10), micros(asOf), until
}

// parseReply returns the time in a reply of lua/apply.lua to so many buckets.
func parseReply(reply []string, buckets int) (clock int64, err error) {
	if len(reply) == 1+buckets {
		if clock, err = strconv.ParseInt(reply[0], 10, 64); err == nil {
			return clock, nil
		}
	}
	return 0, fmt.Errorf("tokenbucket: unexpected reply %.80q", reply)
}

package redisbucket

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/permit"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// joint is one attempt to decide the batches of a group.
type joint struct {
	*Store
	group    *permit.Group
	members  []attempt // of the batches
	buckets  []Bucket  // members[i].scratch.left
	deadline time.Time
	server   clock.Remote
	at       int64 // of the predictions; 0 if there are none
	held     int   // the member whose lock another process holds
	keys     []string
	declared []string // the keys that a script declares; nil: keys
	text     string   // of the joint requests
}

// moves makes the script declare the keys of the buckets alone, without their locks; once it does, only those of the buckets that exist.
func (j *joint) moves(ctx context.Context, apart error) (err error) {
	j.members[0].session.apart(apart)
	buckets := j.bucketKeys()
	if j.declared == nil {
		j.declared = buckets
	} else {
		j.declared, err = j.existing(ctx, buckets)
	}
	return err
}

// bucketKeys returns the keys of the buckets.
func (j *joint) bucketKeys() (keys []string) {
	for i := range j.members {
		keys = append(keys, j.members[i].session.bucket)
	}
	return keys
}

// newJoint returns an attempt. free must be called when it is no longer used.
func (s *Store) newJoint(ctx context.Context, g *permit.Group) (j *joint, free func()) {
	n := len(g.Members)
	j = &joint{Store: s, group: g, members: make([]attempt, n), buckets: make([]Bucket, n), keys: make([]string, 0, 2*n), deadline: timeOf(ctx)}
	for i, b := range g.Members {
		a := &j.members[i]
		a.batch, a.session, a.scratch = b, s.sessionOf(b), s.scratches.Get().(*scratch)
		j.buckets[i] = a.scratch.left
		j.keys = append(j.keys, a.session.bucket, a.session.lock)
		if server := b.Server(); server.Known() {
			j.server = server
		}
	}
	if j.members[0].session.moves() {
		j.declared = j.bucketKeys()
	}
	return j, func() {
		for i := range j.members {
			s.scratches.Put(j.members[i].scratch)
		}
	}
}

// DecideGroup decides the batches of a group in one call of lua/group.lua, all or none. On a cluster the members' keys must be in one slot. It
// waits until the context ends while another process holds the lock of a bucket.
func (s *ScriptStore) DecideGroup(ctx context.Context, g *permit.Group) error {
	j, free := s.newJoint(ctx, g)
	defer free()
	return j.apply(ctx)
}

// apply runs the script until the batches are decided.
func (j *joint) apply(ctx context.Context) error {
	tooLate, waited := false, time.Duration(0)
	for pause := script.NewPause(); ; {
		asked := clock.Mono()
		now, answers, err := j.send(ctx)
		if script.KeysApart(err) && (j.declared == nil || pause.Wait(ctx)) {
			if err = j.moves(ctx, err); err == nil {
				continue
			}
		}
		if err != nil {
			if waited != 0 && ctx.Err() != nil {
				err = fmt.Errorf("%w: key %q", permit.ErrLockNotObtained, j.members[j.held].session.lock)
			}
			return err
		}
		member, status, err := j.decode(now, answers)
		session := j.members[member].session
		session.held.Store(status == locked)
		switch status {
		case late:
			if tooLate || ctx.Err() != nil { // the first time it may be the estimate of the server's clock that is wrong
				return j.tooLate(j.group.Members[member])
			}
			tooLate = true
			j.server.Heard(now, asked, clock.Mono())
		case wrong:
		case notNow:
			if !pause.Wait(ctx) {
				return err
			}
		case locked:
			j.held = member
			if waited == 0 {
				waited = clock.Mono()
			}
			if !pause.Wait(ctx) {
				return fmt.Errorf("%w: key %q: held for %s ms more", permit.ErrLockNotObtained, session.lock, strings.TrimPrefix(answers[member], "locked "))
			}
		default:
			for _, b := range j.group.Members {
				b.Outcome.LockWait = since(waited)
			}
			return err
		}
	}
}

// send runs the script. It returns the server's time, and the answer of each member.
func (j *joint) send(ctx context.Context) (now int64, answers []string, err error) {
	n := len(j.members)
	local := j.clockArg(j.group.Members[0])
	at := asOf(&j.server)
	if j.local {
		at, _ = strconv.ParseInt(local, 10, 64)
	}
	deadline := j.deadlineArg(j.deadline, &j.server)
	keys := j.keys
	if j.declared != nil {
		keys = j.declared
	}
	args := append(slices.Grow(keys[:len(keys):len(keys)], headArgs+2+(bucketArgs+1)*n), local, strconv.FormatInt(j.lockTTL.Milliseconds(), 10), "", deadline, j.group.Choice.String())
	if j.predict(at) {
		args[len(keys)+2] = micros(j.at)
		args = append(args, "")
		for i := range j.members {
			args = append(args, j.members[i].session.text, j.members[i].scratch.prediction.text)
		}
	} else {
		if j.text == "" {
			j.text = encodeJoint(j.group)
		}
		args = append(args, j.text)
		for _, b := range j.group.Members {
			own := *b
			own.Requests = b.Requests[:len(b.Requests)-j.group.Joint]
			args = append(args, "", encodeBatch(&own, deadline))
		}
	}
	if j.declared != nil {
		args = append(args, j.bucketKeys()...)
	}
	reply, err := runBy(ctx, j.bounded, &GroupScript, len(keys), args)
	if err = j.tripError(args[0], j.group.Members[0].Name, err); err == nil {
		now, err = parseReply(reply, n)
	}
	if err != nil {
		j.forget()
		return 0, nil, err
	}
	return now, reply[1:], nil
}

// forget drops what is remembered of the members' states.
func (j *joint) forget() {
	for i := range j.members {
		j.members[i].session.text = ""
	}
}

// predict computes the states after the batches at a time that the server has reached, from those that are remembered. It reports false if
// there is no prediction to send, see Session.predict.
func (j *joint) predict(at int64) bool {
	j.at = 0
	if at == 0 {
		return false
	}
	for i := range j.members {
		if m := j.members[i].session; m.unchanged < minUnchanged || m.text == "" {
			return false
		}
	}
	for i := range j.members {
		j.buckets[i].Set(j.members[i].session.state)
	}
	local := clock.FromMicros(j.group.Members[0].LocalMicros())
	if err := j.decideGroup(at, j.group, j.buckets); err != nil || !j.granted() {
		return false
	}
	for i := range j.members {
		a := &j.members[i]
		if !a.batch.Outcome.Changed {
			return false
		}
		if _, least := j.buckets[i].TTLMillis(a.batch.Outcome.NowMicros, a.batch); at/1000+least > a.session.expires {
			return false
		}
		p := &a.scratch.prediction
		p.asOf, p.local, p.text, p.out = at, local, string(a.scratch.text()), a.batch.Outcome
	}
	j.at = at
	return true
}

// granted reports whether all requests of the group were granted.
func (j *joint) granted() bool {
	for _, b := range j.group.Members {
		for i := range b.Requests[:len(b.Requests)-j.group.Joint] {
			if !b.Requests[i].Grant.OK {
				return false
			}
		}
	}
	for i := range j.group.Joint {
		if !j.group.Granted(i) {
			return false
		}
	}
	return true
}

// encodeJoint encodes the joint requests of a group for lua/group.lua. Equal requests in a row are sent as one with a count.
func encodeJoint(g *permit.Group) string {
	var dst []byte
	for i := 0; i < g.Joint; i++ {
		n := int64(1)
		for ; i+1 < g.Joint && sameJoint(g, i, i+1); i++ {
			n++
		}
		dst = append(strconv.AppendInt(dst, n, 10), ' ')
		for m := range g.Members {
			r := g.Request(m, i)
			dst = append(strconv.AppendInt(dst, r.Permits, 10), ' ')
			dst = append(strconv.AppendInt(dst, r.MaxWaitMicros, 10), ' ')
		}
	}
	return string(dst)
}

func sameJoint(g *permit.Group, i, o int) bool {
	for m := range g.Members {
		if !sameTake(g.Request(m, i), g.Request(m, o)) {
			return false
		}
	}
	return true
}

// decode decodes the answers of the members, and completes the outcomes of the batches. member is the one that is the reason why nothing was
// decided; 0 if there is none.
func (j *joint) decode(clock int64, answers []string) (member int, s status, err error) {
	if j.at != 0 && !slices.ContainsFunc(answers, func(answer string) bool { return answer != "" }) {
		for i := range j.members {
			a := &j.members[i]
			a.session.confirmed(a.scratch, &a.batch.Outcome)
			a.batch.Outcome.ClockMicros = clock
		}
		return 0, decided, nil
	}
	for i, answer := range answers {
		if answer == "-" || strings.HasPrefix(answer, "decided\n") {
			continue
		}
		a := &j.members[i]
		a.predicted = false // an empty answer is none
		s, err = a.decode(clock, answer)
		if s == wrong {
			for m := range j.members {
				j.members[m].session.unchanged = 0
			}
		}
		if errors.Is(err, permit.ErrCorruptState) {
			err = &permit.Fault{Member: i, Err: err}
		}
		return i, s, err
	}
	return 0, decided, j.replay(clock, answers)
}

// replay decides the batches on the states that the script found, see attempt.replay.
func (j *joint) replay(clock int64, answers []string) error {
	olds, news := make([]string, len(answers)), make([]string, len(answers))
	for i, answer := range answers {
		olds[i], news[i], _ = strings.Cut(strings.TrimPrefix(answer, "decided\n"), "\n")
	}
	if err := j.decideOn(clock, olds); err != nil {
		return err
	}
	for i := range j.members {
		a := &j.members[i]
		var text []byte
		if a.batch.Outcome.Changed {
			text = a.scratch.text()
		}
		if string(text) != news[i] {
			j.forget()
			return fmt.Errorf("key %q: Redis decided %q, but this process computes %q from %q; please report this", a.session.bucket, news[i], text, olds[i])
		}
		a.session.remember(olds[i], a.batch, j.buckets[i], news[i])
	}
	return nil
}

// decideOn decides the batches on states in their stored form.
func (j *joint) decideOn(clock int64, olds []string) error {
	for i := range j.members {
		a := &j.members[i]
		if err := j.buckets[i].Parse(olds[i], a.batch.Terms); err != nil {
			return &permit.Fault{Member: i, Err: corruptKey(a.session.bucket, err)}
		}
	}
	if err := j.decideGroup(clock, j.group, j.buckets); err != nil {
		j.forget()
		return err
	}
	return nil
}

// DecideGroup decides the batches of a group under the locks of all its members. It takes the locks in the order of their keys, so that groups
// cannot wait for one another in a circle, and writes all states in one fenced commit.
func (s *LockStore) DecideGroup(ctx context.Context, g *permit.Group) error {
	j, free := s.newJoint(ctx, g)
	defer free()
	if j.declared != nil { // see Decide
		return j.apply(ctx)
	}
	order := make([]int, len(j.members))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return strings.Compare(j.members[a].session.lock, j.members[b].session.lock) })
	tokens := make([]string, len(order))
	lockWait := time.Duration(0)
	defer func() {
		for _, b := range g.Members {
			b.Outcome.LockWait = lockWait
		}
	}()
	for pause := script.NewPause(); ; {
		for n, i := range order {
			m := j.members[i].session
			waited, err := false, error(nil)
			asked := clock.Mono()
			tokens[i], waited, err = s.obtain(ctx, m.lock, &m.held)
			if waited {
				lockWait += clock.Mono() - asked
			}
			if err != nil {
				j.unlock(s, order[:n], tokens)
				return err
			}
			m.held.Store(false)
		}
		done, err := j.underLocks(ctx, tokens)
		if done {
			return err
		}
		if script.KeysApart(err) { // see LockStore.Decide
			for _, i := range order {
				s.releaseNow(ctx, j.members[i].session.lock, tokens[i])
			}
			if err = j.moves(ctx, err); err != nil {
				return err
			}
			return j.apply(ctx)
		}
		j.unlock(s, order, tokens)
		if err != nil {
			return err
		}
		if !pause.Wait(ctx) {
			return fmt.Errorf("%w: key %q was lost again and again; is its time to live of %v too short?",
				permit.ErrLockNotObtained, j.members[0].session.lock, s.lockTTL)
		}
	}
}

// unlock releases locks.
func (j *joint) unlock(s *LockStore, members []int, tokens []string) {
	for _, i := range members {
		s.release(j.members[i].session.lock, tokens[i])
	}
}

// unreadable returns the error of a member whose state Redis cannot read.
func (j *joint) unreadable(member, text string) error {
	i, err := strconv.Atoi(member)
	if err != nil {
		return err
	}
	key := j.members[i].session.bucket
	if strings.HasPrefix(text, "WRONGTYPE") {
		return &permit.Fault{Member: i, Err: wrongType(key)}
	}
	return fmt.Errorf("key %q: redis: %w", key, commandError(text))
}

// underLocks reads the states, decides, and commits. It reports false if the locks may still be held: nothing was written.
func (j *joint) underLocks(ctx context.Context, tokens []string) (released bool, err error) {
	n := len(j.members)
	args := append(slices.Grow(j.keys, 3+4*n), "read", j.clockArg(j.group.Members[0]), "")
	for _, token := range tokens {
		args = append(args, token, "", "", "")
	}
	asked := clock.Mono()
	reply, err := j.run(ctx, &GroupCommitScript, len(j.keys), args...)
	if err != nil || reply[0] == "lost" {
		return false, err
	}
	if reply[0] == "error" {
		return false, j.unreadable(reply[1], reply[2])
	}
	now, err := strconv.ParseInt(reply[1], 10, 64)
	if err != nil {
		return false, err
	}
	j.server.Heard(now, asked, clock.Mono())
	if err := j.decideOn(now, reply[2:]); err != nil {
		return false, err
	}
	head := args[len(j.keys):]
	head[0], head[2] = "write", j.deadlineArg(j.deadline, &j.server)
	for i := range j.members {
		a := &j.members[i]
		rest := head[3+4*i:]
		if rest[1] = reply[2+i]; a.batch.Outcome.Changed {
			ttl, _ := j.buckets[i].TTLMillis(a.batch.Outcome.NowMicros, a.batch)
			rest[2], rest[3] = string(a.scratch.text()), strconv.FormatInt(ttl, 10)
		}
	}
	reply, err = j.run(ctx, &GroupCommitScript, len(j.keys), args...)
	switch {
	case err != nil:
		return false, err
	case reply[0] == "error":
		return false, j.unreadable(reply[1], reply[2])
	case reply[0] == "late":
		return true, j.tooLate(j.group.Members[0])
	}
	return reply[0] == "done", nil
}

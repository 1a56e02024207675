package fleet

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Reader reads what Publishers have written. It may be used by many goroutines at once. What somebody else has written there is
// skipped, and no reply is larger than what Publishers can have written.
type Reader struct {
	client Client
	settings

	mu    sync.Mutex
	heard map[string]*heard // by instance
}

// heard is what was read of an instance last: what has not changed since is not read, or not taken apart, again.
type heard struct {
	change  string            // of the rows
	rows    map[string]*Limit // without calls
	started time.Time
	fields  map[string]string
	limits  map[string]*Limit
}

// Bounds of what is read.
const (
	mostInstances = 500
	mostFields    = MostLimits + MostSemaphores + MostWindows + 100
	mostFieldSize = 256 << 10
	mostPageSize  = 4 << 20
	pageFields    = 1000
	mostID        = 64
	mostEventSize = 4 << 10
)

// NewReader returns a Reader.
func NewReader(client Client, opts ...Option) *Reader {
	return &Reader{client: client, settings: newSettings(opts), heard: map[string]*heard{}}
}

// Snapshot reads what all instances have published last. It fails only if Redis cannot be read.
func (r *Reader) Snapshot(ctx context.Context) (*Snapshot, error) {
	if err := r.check(); err != nil {
		return nil, err
	}
	s := &Snapshot{}
	members, at, err := r.members(ctx, r.instancesKey(), "-inf", mostInstances, mostID, s)
	if err != nil {
		return nil, err
	}
	s.At = time.UnixMilli(at)
	there := map[string]bool{}
	for _, m := range members {
		there[m.text] = true
		i, err := r.instance(ctx, m.text, s)
		if err != nil {
			return nil, err
		}
		if i != nil && s.At.Sub(i.Beat) < ForgottenAfter {
			s.Instances = append(s.Instances, *i)
		}
	}
	slices.SortFunc(s.Instances, func(a, b Instance) int { return a.Started.Compare(b.Started) })
	r.forget(there)
	return s, nil
}

// instance reads one; nil: Redis has lost it.
func (r *Reader) instance(ctx context.Context, id string, s *Snapshot) (*Instance, error) {
	fields, err := r.hash(ctx, r.instanceKey(id), s)
	if err != nil || fields["beat"] == "" {
		return nil, err
	}
	r.mu.Lock()
	before := r.heard[id]
	r.mu.Unlock()
	now := &heard{change: fields[rowsField], fields: fields}
	if before != nil && before.change == now.change && now.change != "" {
		now.rows = before.rows
	} else {
		texts, err := r.hash(ctx, r.rowsKey(id), s)
		if err != nil {
			return nil, err
		}
		d := decoder{key: r.rowsKey(id), fields: texts}
		now.rows = d.limits()
		s.Skipped = append(s.Skipped, d.skipped...)
	}
	d := decoder{key: r.instanceKey(id), fields: fields, rows: now.rows, before: before}
	i := d.instance(id)
	s.Skipped = append(s.Skipped, d.skipped...)
	if i != nil {
		now.started, now.limits = i.Started, i.Limits
		r.mu.Lock()
		r.heard[id] = now
		r.mu.Unlock()
	}
	return i, nil
}

// forget drops what was read of instances that are no more.
func (r *Reader) forget(there map[string]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := range r.heard {
		if !there[id] {
			delete(r.heard, id)
		}
	}
}

// hash reads a hash, part by part.
func (r *Reader) hash(ctx context.Context, key string, s *Snapshot) (map[string]string, error) {
	fields, large := map[string]string{}, 0
	for cursor := "0"; ; {
		reply, err := scanScript.run(ctx, r.client, 1, key, cursor, strconv.Itoa(pageFields), strconv.Itoa(mostFieldSize), strconv.Itoa(mostPageSize))
		if alien(err) {
			s.skip(key, "", err.Error())
			return nil, nil
		}
		if err != nil || len(reply)%2 != 0 || len(reply) == 0 {
			return nil, unreadable(err)
		}
		for i := 2; i < len(reply); i += 2 {
			fields[reply[i]] = reply[i+1]
		}
		n, _ := strconv.Atoi(reply[1])
		large += n
		cursor = reply[0]
		if len(fields) > mostFields {
			s.skip(key, "", fmt.Sprintf("more than %d fields", mostFields))
			return nil, nil
		}
		if cursor == "0" {
			break
		}
	}
	if large > 0 {
		s.skip(key, "", fmt.Sprintf("%d fields are too large", large))
	}
	return fields, nil
}

func (s *Snapshot) skip(key, field, why string) {
	s.Skipped = append(s.Skipped, &DataError{shortened(key, mostName), shortened(field, mostName), shortened(why, mostText)})
}

// member of a sorted set.
type member struct {
	text  string
	score float64
}

// members are those of a sorted set from a score on, the highest first, and Redis' clock in milliseconds.
func (r *Reader) members(ctx context.Context, key, least string, most, size int, s *Snapshot) (list []member, at int64, err error) {
	reply, err := rangeScript.run(ctx, r.client, 1, key, least, strconv.Itoa(most), strconv.Itoa(size))
	if alien(err) {
		s.skip(key, "", err.Error())
		at, err = r.time(ctx)
		return nil, at, err
	}
	if err != nil || len(reply) < 2 || len(reply)%2 != 0 {
		return nil, 0, unreadable(err)
	}
	if at, err = strconv.ParseInt(reply[0], 10, 64); err != nil {
		return nil, 0, unreadable(nil)
	}
	if reply[1] != "0" {
		s.skip(key, "", reply[1]+" members are too large")
	}
	for i := 2; i < len(reply); i += 2 {
		score, err := strconv.ParseFloat(reply[i+1], 64)
		if err == nil {
			list = append(list, member{reply[i], score})
		}
	}
	return list, at, nil
}

// time is Redis' clock in milliseconds.
func (r *Reader) time(ctx context.Context) (int64, error) {
	cmd := redis.NewTimeCmd(ctx, "time")
	if err := r.client.Process(ctx, cmd); err != nil {
		return 0, err
	}
	return cmd.Val().UnixMilli(), cmd.Err()
}

// alien tells whether a key has content of another type.
func alien(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply) && strings.Contains(reply.Error(), "WRONGTYPE") // before Redis 7 with the script's line before it
}

func unreadable(err error) error {
	if err == nil {
		return errors.New("fleet: a reply that is none")
	}
	return err
}

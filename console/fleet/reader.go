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

// Reader reads what Publishers have written. It may be used concurrently. Data that no Publisher has written is skipped, and
// no reply is larger than the largest that Publishers can cause.
type Reader struct {
	client Client
	settings

	mu    sync.Mutex
	cache map[string]*cached // by instance
}

// cached is the last reading of an instance. Rows are read, and records decoded, only if they have changed since.
type cached struct {
	change  string            // number of changes of the rows
	size    int               // of the rows: see sizeOf
	rows    map[string]*Limit // without counters
	started time.Time
	fields  map[string]string
	limits  map[string]*Limit
}

// Bounds on reading.
const (
	mostInstances = 500
	mostFields    = MostLimits + MostSemaphores + MostWindows + 100
	mostFieldSize = 256 << 10
	mostPageSize  = 4 << 20
	fieldSize     = 512      // of a field in memory, besides its name and its value
	mostKeySize   = 24 << 20 // of a hash in memory: a Publisher's with the longest names and rows takes about 17 MB
	pageFields    = 1000
	mostID        = 64
	mostEventSize = 4 << 10
)

// NewReader returns a Reader.
func NewReader(client Client, opts ...Option) *Reader {
	return &Reader{client: client, settings: newSettings(opts), cache: map[string]*cached{}}
}

// sizeOf returns about how many bytes a field takes in memory.
func sizeOf(name, text string) int { return fieldSize + len(name) + len(text) }

// reading is a Snapshot that is being read, and how many bytes of fields there may be further.
type reading struct {
	*Snapshot
	left int
}

// take counts bytes, and reports whether there is room for them.
func (s *reading) take(size int) bool {
	s.left -= size
	return s.left >= 0
}

// Snapshot reads the last publication of every instance. It fails only if Redis cannot be read. What is larger than the largest
// publications, or together larger than WithReadLimit allows, is left out and reported in Skipped.
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
	there, all := map[string]bool{}, &reading{s, r.most}
	for n, m := range members {
		i, err := r.instance(ctx, m.text, all)
		if err != nil {
			return nil, err
		}
		if all.left < 0 {
			s.skip(r.instancesKey(), "", fmt.Sprintf("%d of %d instances: the data of all takes more than %.3g MB", len(members)-n, len(members), float64(r.most)/(1<<20)))
			break
		}
		there[m.text] = true
		if i != nil && s.At.Sub(i.Beat) < ForgottenAfter {
			s.Instances = append(s.Instances, *i)
		}
	}
	slices.SortFunc(s.Instances, func(a, b Instance) int { return a.Started.Compare(b.Started) })
	r.forget(there)
	return s, nil
}

// instance reads one instance; nil if Redis has lost it.
func (r *Reader) instance(ctx context.Context, id string, s *reading) (*Instance, error) {
	fields, _, err := r.hash(ctx, r.instanceKey(id), s)
	if err != nil || fields["beat"] == "" {
		return nil, err
	}
	r.mu.Lock()
	before := r.cache[id]
	r.mu.Unlock()
	now := &cached{change: fields[rowsField], fields: fields}
	if before != nil && before.change == now.change && now.change != "" {
		now.rows, now.size = before.rows, before.size
		if !s.take(now.size) {
			return nil, nil
		}
	} else {
		texts, size, err := r.hash(ctx, r.rowsKey(id), s)
		if err != nil || s.left < 0 {
			return nil, err
		}
		now.size = size
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
		r.cache[id] = now
		r.mu.Unlock()
	}
	return i, nil
}

// forget drops the cache of instances that no longer exist.
func (r *Reader) forget(there map[string]bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id := range r.cache {
		if !there[id] {
			delete(r.cache, id)
		}
	}
}

// hash reads a hash page by page, and returns its fields and about how many bytes they take. It returns none if they are more
// than a Publisher writes, or if there is no room for them.
func (r *Reader) hash(ctx context.Context, key string, s *reading) (fields map[string]string, size int, err error) {
	fields, large := map[string]string{}, 0
	for cursor := "0"; ; {
		reply, err := scanScript.run(ctx, r.client, 1, key, cursor, strconv.Itoa(pageFields), strconv.Itoa(mostFieldSize), strconv.Itoa(mostPageSize))
		if alien(err) {
			s.skip(key, "", err.Error())
			return nil, 0, nil
		}
		if err != nil || len(reply)%2 != 0 || len(reply) == 0 {
			return nil, 0, unreadable(err)
		}
		for i := 2; i < len(reply); i += 2 {
			if _, again := fields[reply[i]]; !again { // HSCAN may return a field twice
				size += sizeOf(reply[i], reply[i+1])
			}
			fields[reply[i]] = reply[i+1]
		}
		n, _ := strconv.Atoi(reply[1])
		large += n
		cursor = reply[0]
		switch {
		case len(fields)+large > mostFields:
			s.skip(key, "", fmt.Sprintf("more than %d fields", mostFields))
			return nil, 0, nil
		case size > mostKeySize:
			s.skip(key, "", fmt.Sprintf("takes more than %d MB", mostKeySize>>20))
			return nil, 0, nil
		case size > s.left:
			s.left = -1
			return nil, 0, nil
		}
		if cursor == "0" {
			break
		}
	}
	if large > 0 {
		s.skip(key, "", fmt.Sprintf("%d fields are too large", large))
	}
	s.take(size)
	return fields, size, nil
}

func (s *Snapshot) skip(key, field, why string) {
	s.Skipped = append(s.Skipped, &DataError{shortened(key, mostName), shortened(field, mostName), shortened(why, mostText)})
}

// member is a member of a sorted set.
type member struct {
	text  string
	score float64
}

// members returns the members of a sorted set from a score on, the highest first, and Redis' clock in milliseconds.
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

// time returns Redis' clock in milliseconds.
func (r *Reader) time(ctx context.Context) (int64, error) {
	cmd := redis.NewTimeCmd(ctx, "time")
	if err := r.client.Process(ctx, cmd); err != nil {
		return 0, err
	}
	return cmd.Val().UnixMilli(), cmd.Err()
}

// alien reports whether err is about a key of another type.
func alien(err error) bool {
	var reply redis.Error
	return errors.As(err, &reply) && strings.Contains(reply.Error(), "WRONGTYPE") // before Redis 7 the message begins with the script's line
}

func unreadable(err error) error {
	if err == nil {
		return errors.New("fleet: malformed reply")
	}
	return err
}

package tokenbucket

import (
	"context"
	_ "embed"
	"log/slog"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

const (
	// beatEvery is how often an instance shows that it lives; who was seen within liveFor counts.
	beatEvery = 2 * time.Second
	liveFor   = 7 * time.Second
)

//go:embed lua/beat.lua
var beatSource string
var beatScript = script.New(beatSource)

// member is this process among those that share a store's buckets. It shows that it lives as long as a limiter holds it.
type member struct {
	id   string
	live atomic.Int64 // instances last known; 0: none yet
	seen time.Time    // when there were so many
	told bool         // that it does not work
}

// census counts the instances that use a Redis and a key prefix.
type census struct {
	mu     sync.Mutex
	member weak.Pointer[member]
}

// counted is a Store that knows how many processes use it.
type counted interface{ join() *member }

// join makes this process one of those that are counted.
func (s *redisBase) join() *member {
	s.census.mu.Lock()
	defer s.census.mu.Unlock()
	if m := s.census.member.Value(); m != nil {
		return m
	}
	m := &member{id: strconv.FormatUint(rand.Uint64(), 36)}
	s.census.member = weak.Make(m)
	s.beat(s.census.member, 0)
	return m
}

// count notes how many instances there are. Fewer than before are believed only when that has lasted for as long as one that
// is silent counts: after Redis has lost its state, or its clock was set, each is the first of all to be seen again.
func (m *member) count(n int64) {
	if now := time.Now(); n >= m.live.Load() || now.Sub(m.seen) > liveFor {
		m.live.Store(n)
		m.seen = now
	}
}

// beat shows that a member lives, again and again.
func (s *redisBase) beat(of weak.Pointer[member], pause time.Duration) {
	time.AfterFunc(pause, func() {
		m := of.Value()
		if m == nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.Background(), beatEvery)
		defer cancel()
		reply, err := beatScript.Run(ctx, s.client, 1, s.prefix+"instances", m.id, strconv.FormatInt(liveFor.Milliseconds(), 10))
		if err == nil && len(reply) == 1 {
			if n, err := strconv.ParseInt(reply[0], 10, 64); err == nil && n > 0 {
				m.count(n)
			}
			m.told = false
		} else {
			m.seen = time.Now() // of what was not asked nothing is known
			if !away(err) {
				m.live.Store(0)
			}
			if !m.told && !away(err) {
				m.told = true
				slog.Warn("tokenbucket: instances cannot be counted; LocalShare goes by what it was given", "error", err)
			}
		}
		s.beat(of, beatEvery*9/10+rand.N(beatEvery/5))
	})
}

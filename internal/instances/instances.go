// Package instances counts the processes that use a Redis and a key prefix: each shows every two seconds that it lives, and learns
// how many others do.
package instances

import (
	"context"
	_ "embed"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

const (
	// heartbeatEvery is how often an instance shows that it lives; who was seen within LiveFor counts.
	heartbeatEvery = 2 * time.Second
	LiveFor        = 7 * time.Second
)

//go:embed heartbeat.lua
var heartbeatSource string

// Script is the heartbeat's, for those who stand in for Redis.
var Script = script.New(heartbeatSource)

// Member is this process among those that are counted. It shows that it lives as long as anybody holds it.
type Member struct {
	id   string
	live atomic.Int64 // instances last known; 0: none yet
	told bool         // that it does not work

	mu   sync.Mutex
	seen time.Time // when there were so many
}

// Live is how many instances there are, as far as known; 0: it is not.
func (m *Member) Live() int64 { return m.live.Load() }

// Instances are those that use a Redis and a key prefix. The zero value is ready; it is safe for concurrent use and must not be copied.
type Instances struct {
	mu     sync.Mutex
	member weak.Pointer[Member]
}

// Join makes this process one of those that are counted under a key. As long as Redis refuses to count, warn is told once why.
func (i *Instances) Join(client script.Client, key string, warn func(error)) *Member {
	i.mu.Lock()
	defer i.mu.Unlock()
	if m := i.member.Value(); m != nil {
		return m
	}
	m := &Member{id: strconv.FormatUint(rand.Uint64(), 36)}
	i.member = weak.Make(m)
	h := heartbeat{client, key, warn, i.member}
	h.after(0)
	return m
}

// Count notes how many instances there are. Fewer than before are believed only when that has lasted for as long as one that
// is silent counts: after Redis has lost its state, or its clock was set, each is the first of all to be seen again.
func (m *Member) Count(n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if now := time.Now(); n >= m.live.Load() || now.Sub(m.seen) > LiveFor {
		m.live.Store(n)
		m.seen = now
	}
}

// unknown notes that Redis was not asked: until now nothing was learned. It forgets what was, if that is how it will stay.
func (m *Member) unknown(forget bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.seen = time.Now()
	if forget {
		m.live.Store(0)
	}
}

// heartbeat shows that a member lives, again and again.
type heartbeat struct {
	client script.Client
	key    string
	warn   func(error)
	of     weak.Pointer[Member]
}

func (h *heartbeat) after(pause time.Duration) { time.AfterFunc(pause, h.show) }

func (h *heartbeat) show() {
	m := h.of.Value()
	if m == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), heartbeatEvery)
	defer cancel()
	reply, err := Script.Run(ctx, h.client, 1, h.key, m.id, strconv.FormatInt(LiveFor.Milliseconds(), 10))
	if err == nil && len(reply) == 1 {
		if n, err := strconv.ParseInt(reply[0], 10, 64); err == nil && n > 0 {
			m.Count(n)
		}
		m.told = false
	} else {
		m.unknown(!script.Away(err))
		if !m.told && !script.Away(err) {
			m.told = true
			h.warn(err)
		}
	}
	h.after(heartbeatEvery*9/10 + rand.N(heartbeatEvery/5))
}

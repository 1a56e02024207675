// Package instances counts the processes that share a Redis and a key prefix. Each process sends a heartbeat every two seconds, and the
// reply contains the number of live instances.
package instances

import (
	"context"
	_ "embed"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
	"weak"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

const (
	// heartbeatEvery is the mean interval between heartbeats of an instance. An instance counts for LiveFor after its last heartbeat.
	heartbeatEvery = 2 * time.Second
	LiveFor        = 7 * time.Second
)

//go:embed heartbeat.lua
var heartbeatSource string

// Script is the heartbeat's script. It is exported for fakes of Redis.
var Script = script.New(heartbeatSource)

// Member is this process as one of the counted instances. It sends heartbeats while it is reachable.
type Member struct {
	id     string
	live   atomic.Int64 // number of live instances; 0 if unknown
	warned bool         // warn was called since the last success; used by the heartbeat only

	mu        sync.Mutex
	countedAt time.Time // when live was last confirmed or raised; guarded by mu
}

// Live returns the number of live instances, this one included, or 0 if it is unknown.
func (m *Member) Live() int64 { return m.live.Load() }

// Instances holds this process's Member for one Redis and key prefix. The zero value is ready for use. It is safe for concurrent use and
// must not be copied.
type Instances struct {
	mu     sync.Mutex
	member weak.Pointer[Member]
}

// Join counts this process under a key, and returns its Member. If Redis refuses the heartbeats, warn is called with the error, once until
// a heartbeat succeeds.
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

// Count records the number of live instances. A decrease takes effect only after it has lasted for LiveFor: when Redis has lost its state,
// or its clock was set, the instances join again one by one.
func (m *Member) Count(n int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if now := time.Now(); n >= m.live.Load() || now.Sub(m.countedAt) > LiveFor {
		m.live.Store(n)
		m.countedAt = now
	}
}

// unknown records a heartbeat without a count. The last count stays, unless forget is set, for errors that do not go away by themselves.
func (m *Member) unknown(forget bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.countedAt = time.Now()
	if forget {
		m.live.Store(0)
	}
}

// heartbeat sends the heartbeats of a member while it is reachable.
type heartbeat struct {
	client script.Client
	key    string
	warn   func(error)
	of     weak.Pointer[Member]
}

// after schedules the next heartbeat.
func (h *heartbeat) after(pause time.Duration) { time.AfterFunc(pause, h.show) }

// ask sends a heartbeat and returns the reply. A panic of the client's hooks becomes an error, because it would end the process.
func (h *heartbeat) ask(m *Member) (reply []string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), heartbeatEvery)
	defer cancel()
	defer func() {
		if value := recover(); value != nil {
			err = fmt.Errorf("the client panicked: %v", value)
		}
	}()
	return Script.Run(ctx, h.client, 1, h.key, m.id, strconv.FormatInt(LiveFor.Milliseconds(), 10))
}

// show sends a heartbeat, records the count, and schedules the next heartbeat.
func (h *heartbeat) show() {
	m := h.of.Value()
	if m == nil {
		return
	}
	reply, err := h.ask(m)
	if err == nil && len(reply) == 1 {
		if n, err := strconv.ParseInt(reply[0], 10, 64); err == nil && n > 0 {
			m.Count(n)
		}
		m.warned = false
	} else {
		m.unknown(!script.Away(err))
		if !m.warned && !script.Away(err) {
			m.warned = true
			h.warn(err)
		}
	}
	h.after(heartbeatEvery*9/10 + rand.N(heartbeatEvery/5))
}

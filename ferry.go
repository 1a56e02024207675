package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// A ferry takes what many lines of one store have to ask to Redis in one trip: one call of the script for all their
// buckets on a single server, one pipeline where buckets live on several. Idle, a line leaves at once; when two trips are
// under way, the lines that board meanwhile share the next one. Each bucket's batch is still one atomic decision, and no
// bucket waits for another's lock.
//
// A pipeline has come back when the last of its answers has: with buckets of several servers in it, one that hangs would
// keep all others' from their lines. So each server has a ferry of its own, once the client knows where keys live.
//
// (Go-redis' own AutoPipeliner only joins what it is given: with a thousand buckets it made a call of this store 1.1
// times as fast, since each still costs Redis the start of a script. One script for all makes it several times.)
type ferry struct {
	store     *RedisScriptStore
	pipeline  func() redis.Pipeliner // nil: the client has none
	scattered atomic.Bool            // buckets live on different servers
	charted   atomic.Bool            // the client knows which, and asks nobody for it
	others    sync.Map               // then: the ferries to each, by its address

	mu      sync.Mutex
	waiting []*coordinator
	trips   [2]*trip

	swimming       bool // a caller is under way by itself
	swimmer        *trip
	swimmerTimeout time.Duration
	server         clock.Remote // the server's clock
}

// trip is a goroutine that sails as long as there is anybody to take.
type trip struct {
	began time.Duration // see mono
	home  bool          // it has its answers, and will look who waits

	base    *redisBase
	ctx     context.Context
	cancel  context.CancelFunc
	until   time.Time
	lines   []*coordinator // for reuse
	cargoes []cargo
	args    []string
	woken   []chan struct{}
}

const (
	// maxTrip bounds the buckets of one call, and with it how long a script may occupy Redis.
	maxTrip = 128
	// stalled is how long a trip may take until nobody counts on it any more.
	stalled = 250 * time.Millisecond
)

// carrier can take the batches of several lines at once.
type carrier interface {
	board(l *coordinator) // puts a line on the next trip
	hurry()               // replaces a trip that does not come back
	// swim lets the caller take its line across by itself, if nobody else is on the way. It reports false if not.
	swim(l *coordinator) bool
}

// board puts a line on the next trip, where it will say what it has to send.
func (s *RedisScriptStore) board(l *coordinator) {
	if s.ferry.pipeline == nil || s.local {
		go l.fly()
		return
	}
	f := s.ferryTo(l)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.waiting = append(f.waiting, l)
	f.sail()
}

// ferryTo is the ferry to the server that holds a line's bucket.
func (s *RedisScriptStore) ferryTo(l *coordinator) *ferry {
	f := &s.ferry
	if !f.charted.Load() {
		return f
	}
	bucket, _ := s.keys(l.name)
	server := s.server(context.Background(), bucket)
	if server == "" {
		return f
	}
	own, ok := f.others.Load(server)
	if !ok {
		fresh := &ferry{store: s, pipeline: f.pipeline}
		fresh.scattered.Store(true)
		own, _ = f.others.LoadOrStore(server, fresh)
	}
	return own.(*ferry)
}

// server is the address of the one that holds a key, as far as the client knows; "": it does not. The first time a
// cluster's client asks for its map of them, from then on it looks there. Should the map be old, the pipeline is told so
// and follows: who shares it only waits for another server, too.
func (s *RedisScriptStore) server(ctx context.Context, key string) string {
	var node *redis.Client
	var err error
	switch c := s.client.(type) {
	case *redis.ClusterClient:
		node, err = c.MasterForKey(ctx, key)
	case *redis.Ring:
		node, err = c.GetShardClientForKey(key)
	}
	if node == nil || err != nil {
		return ""
	}
	return node.Options().Addr
}

// chart notes that the client knows its servers. Who waits to go to any of them goes to his own.
func (f *ferry) chart() {
	f.charted.Store(true)
	f.mu.Lock()
	waiting := f.waiting
	f.waiting = nil
	f.mu.Unlock()
	for _, l := range waiting {
		f.store.board(l)
	}
}

// hurry makes sure that nobody waits for a trip that will not come back.
func (s *RedisScriptStore) hurry() {
	s.ferry.hurry()
	s.ferry.others.Range(func(_, f any) bool { f.(*ferry).hurry(); return true })
}

func (f *ferry) hurry() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.waiting) > 0 {
		f.sail()
	}
}

// swim implements carrier. A goroutine of its own for a single batch costs as much time as a fast network takes to
// answer. But a caller that swims cannot come back before its answer: so nothing may be able to call it back, the server
// must have answered lately, and the client must time out as the line does.
func (s *RedisScriptStore) swim(l *coordinator) bool {
	f := &s.ferry
	f.mu.Lock()
	if f.scattered.Load() || f.pipeline == nil || s.local || f.swimming || f.trips != [2]*trip{} ||
		!f.answeredWithin(l.timeout) {
		f.mu.Unlock()
		return false
	}
	if f.swimmer == nil || f.swimmerTimeout != l.timeout {
		quick := s.redisBase
		quick.client = s.client.(*redis.Client).WithTimeout(l.timeout)
		f.swimmer, f.swimmerTimeout = &trip{base: &quick, lines: make([]*coordinator, 1)}, l.timeout
	}
	f.swimming = true
	t := f.swimmer
	f.mu.Unlock()

	t.lines[0] = l
	f.cross(t)
	t.lines[0] = nil

	f.mu.Lock()
	f.swimming = false
	f.mu.Unlock()
	return true
}

// answeredWithin tells that the server has answered lately. mu is held.
func (f *ferry) answeredWithin(d time.Duration) bool {
	_, received := f.server.Last()
	return f.server.Known() && mono()-received <= d
}

// sail begins a trip unless one is at home or two are under way. It holds mu.
func (f *ferry) sail() {
	free := -1
	for i, t := range f.trips {
		switch {
		case t == nil:
			free = i
		case t.home:
			return
		}
	}
	for i, t := range f.trips {
		if free < 0 && mono()-t.began > stalled {
			free = i
		}
	}
	if free >= 0 {
		t := &trip{home: true, base: &f.store.redisBase}
		f.trips[free] = t
		go f.run(t)
	}
}

// run sails until nobody waits.
func (f *ferry) run(t *trip) {
	for f.embark(t) {
		f.cross(t)
		yield()
	}
	if t.cancel != nil {
		t.cancel()
	}
}

// embark notes who comes along, or reports that the trip is over.
func (f *ferry) embark(t *trip) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	slot := slices.Index(f.trips[:], t)
	if slot < 0 {
		return false // the others gave it up
	}
	if len(f.waiting) == 0 {
		f.trips[slot] = nil
		return false
	}
	n := min(len(f.waiting), maxTrip)
	t.lines = append(t.lines[:0], f.waiting[:n]...)
	f.waiting = slices.Delete(f.waiting, 0, n)
	t.home, t.began = false, mono()
	if len(f.waiting) > 0 {
		f.sail()
	}
	return true
}

// back notes that a trip has its answers. Who is answered and asks again waits for it to sail again, rather than to let
// another sail with the first of them.
func (f *ferry) back(t *trip) {
	f.mu.Lock()
	t.home = true
	f.mu.Unlock()
}

// cargo is one line's batch on a trip.
type cargo struct {
	line   *coordinator
	flight *flight
	attempt
	deadline int64 // microseconds of the server's clock; 0: none
}

// cross takes the batches of lines to Redis and hands out the answers.
func (f *ferry) cross(t *trip) {
	defer f.back(t)
	cargoes := t.cargoes[:0]
	var until time.Time
	requests := 0
	for i, l := range t.lines {
		if requests >= maxBatch {
			f.mu.Lock()
			f.waiting = append(slices.Clone(t.lines[i:]), f.waiting...)
			f.sail()
			f.mu.Unlock()
			break
		}
		flight := l.depart()
		if flight == nil {
			continue
		}
		requests += len(flight.batch.Requests)
		c := cargo{line: l, flight: flight, attempt: attempt{batch: &flight.batch, cached: f.store.cacheOf(&flight.batch)}}
		if server := flight.batch.server(); server.Known() {
			c.deadline = server.Earliest(clock.Of(flight.until))
		}
		if flight.until.After(until) {
			until = flight.until
		}
		cargoes = append(cargoes, c)
	}
	t.cargoes = cargoes
	if len(cargoes) == 0 {
		return
	}
	ctx := t.within(until)
	if f.scattered.Load() {
		f.pipelined(ctx, t, cargoes)
	} else {
		f.together(ctx, t, cargoes)
	}
	clear(cargoes)
}

// within is a context that ends in time. One timer serves many crossings: each may end a tenth early.
func (t *trip) within(until time.Time) context.Context {
	left := time.Until(until)
	if t.ctx != nil && t.until.Before(until) && time.Until(t.until) > left-left/10 {
		return t.ctx
	}
	if t.cancel != nil {
		t.cancel()
	}
	t.ctx, t.cancel = context.WithDeadline(context.Background(), until)
	t.until = until
	return t.ctx
}

// together takes all batches in one call of the script.
func (f *ferry) together(ctx context.Context, t *trip, cargoes []cargo) {
	f.mu.Lock()
	at := asOf(&f.server)
	f.mu.Unlock()
	earliest := int64(0)
	for i := range cargoes {
		if d := cargoes[i].deadline; d != 0 && (earliest == 0 || d < earliest) {
			earliest = d
		}
	}
	keys := 2 * len(cargoes)
	args := slices.Grow(t.args[:0], keys+headArgs+bucketArgs*len(cargoes))[:keys+headArgs+bucketArgs*len(cargoes)]
	t.args = args
	clear(args)
	f.store.head(args[keys:], "", at, micros(earliest))
	for i := range cargoes {
		c := &cargoes[i]
		args[2*i], args[2*i+1] = c.cached.bucket, c.cached.lock
		c.encode(args[keys+headArgs+bucketArgs*i:], at, micros(c.deadline))
	}
	sent := mono()
	reply, err := t.base.run(ctx, &applyScript, keys, args...)
	if err != nil && len(cargoes) > 1 && redis.HasErrorPrefix(err, "CROSSSLOT") {
		f.scattered.Store(true) // it is a server of a cluster
		f.pipelined(ctx, t, cargoes)
		return
	}
	received := mono()
	now := int64(0)
	if err == nil {
		now, err = parseReply(reply, len(cargoes))
	}
	f.mu.Lock()
	if t.home = true; err == nil {
		f.server.Heard(now, sent, received)
	}
	f.mu.Unlock()
	for i := range cargoes {
		if err != nil {
			cargoes[i].lost(err, &t.woken)
		} else {
			f.deliver(&cargoes[i], now, reply[1+i], &t.woken)
		}
	}
}

// pipelined takes the batches in one pipeline, which the client splits by server if it must.
func (f *ferry) pipelined(ctx context.Context, t *trip, cargoes []cargo) {
	if all := &f.store.ferry; !all.charted.Load() && f.store.server(ctx, cargoes[0].cached.bucket) != "" {
		all.chart()
	}
	pipe := f.pipeline()
	calls := make([]script.Call, len(cargoes))
	for i := range cargoes {
		c := &cargoes[i]
		server := c.batch.server()
		at := asOf(&server)
		args := make([]string, 2+headArgs+bucketArgs)
		args[0], args[1] = c.cached.bucket, c.cached.lock
		deadline := micros(c.deadline)
		f.store.head(args[2:], "", at, deadline)
		c.encode(args[2+headArgs:], at, deadline)
		calls[i] = applyScript.Call(ctx, false, 2, args)
		_ = pipe.Process(ctx, calls[i])
	}
	_, _ = pipe.Exec(ctx) // each has its own error
	f.back(t)
	for i := range cargoes {
		c := &cargoes[i]
		reply, err := calls[i].Result()
		clock := int64(0)
		if err == nil {
			clock, err = parseReply(reply, 1)
		}
		switch {
		case err == nil:
			f.deliver(c, clock, reply[1], &t.woken)
		case redis.HasErrorPrefix(err, "NOSCRIPT"), script.NotExecuted(err):
			f.alone(c)
		default:
			script.Reload(ctx, f.store.client, err)
			c.lost(err, &t.woken)
		}
	}
}

func micros(n int64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(n, 10)
}

// deliver hands a bucket's answer to its line.
func (f *ferry) deliver(c *cargo, clock int64, answer string, woken *[]chan struct{}) {
	out, status, err := c.decode(clock, answer)
	if status != decided {
		f.alone(c)
		return
	}
	c.line.land(c.flight, &out, err, woken)
}

// alone lets a batch wait for its bucket's lock, or try again, without the others.
func (f *ferry) alone(c *cargo) {
	line, flight, a := c.line, c.flight, c.attempt
	go func() {
		ctx, cancel := context.WithDeadline(context.Background(), flight.until)
		defer cancel()
		out, err := f.store.apply(ctx, &a)
		line.land(flight, &out, err, new([]chan struct{}))
	}()
}

// lost tells a line that its batch got no answer.
func (c *cargo) lost(err error, woken *[]chan struct{}) {
	c.cached.text = ""
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: bucket %q: %w", ErrStoreTimeout, label(c.batch.Name), err)
	}
	c.line.land(c.flight, &outcome{}, err, woken)
}

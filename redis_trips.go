package tokenbucket

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/internal/clock"
	"github.com/go-tokenbucket/tokenbucket/internal/script"
)

// redisTrips takes batches of many buckets to Redis in one round trip: one call of the script for all of them on a single server, one
// pipeline where buckets live on several. Each bucket's batch is still one atomic decision, and no bucket waits for another's lock.
//
// A pipeline is answered when its last command is: with buckets of several servers in it, one that hangs would keep all others'
// from their callers. So each server has a route of its own, once the client knows where keys live.
//
// (Go-redis' own AutoPipeliner only joins what it is given: with a thousand buckets it made a call of this store 1.1
// times as fast, since each still costs Redis the start of a script. One script for all makes it several times.)
type redisTrips struct {
	trips
	pipeline  func() redis.Pipeliner // nil: the client has none
	scattered atomic.Bool            // buckets live on different servers
	located   atomic.Bool            // the client knows on which, and asks nobody for it
	buffers   sync.Pool              // of *tripBuffer
	until     script.Until

	mu     sync.Mutex
	server clock.Remote // the one server's clock

	quick *quickClient // for callers' own trips; nil: the client heeds deadlines by itself
}

// tripBuffer is what a round trip needs.
type tripBuffer struct {
	attempts []attempt
	args     []string
}

const (
	// maxTrip bounds the buckets of one call, and with it how long a script may occupy Redis.
	maxTrip = 128
	// stalled is how long a trip may take until nobody counts on it any more.
	stalled = 250 * time.Millisecond
)

// initTrips makes the store's trips for its kind of client.
func (s *RedisScriptStore) initTrips() {
	r := &s.trips
	r.trips = trips{
		Send: s.send, Max: maxTrip, Size: (*batch).size, MaxSize: maxBatch, Parallel: 2, Stall: stalled,
	}
	r.buffers.New = func() any { return new(tripBuffer) }
	switch c := s.client.(type) {
	case *redis.Client:
		r.pipeline, r.Direct = c.Pipeline, s.sendDirect
		if s.err == nil && !script.HeedsDeadline(c) {
			r.quick = &quickClient{Client: c}
		}
	case *redis.ClusterClient:
		r.pipeline = c.Pipeline
		r.scattered.Store(true)
	case *redis.Ring:
		r.pipeline = c.Pipeline
		r.scattered.Store(true)
		r.located.Store(true)
	}
}

// route is the address of the server that holds a bucket; "": there is only one, or the client does not know yet.
func (s *RedisScriptStore) route(name string) string {
	if !s.trips.located.Load() {
		return ""
	}
	bucket, _ := s.keys(name)
	return s.serverOf(context.Background(), bucket)
}

// serverOf is the address of the one that holds a key, as far as the client knows; "": it does not. The first time a
// cluster's client asks for its map of them, from then on it looks there. Should the map be old, the pipeline is told so
// and follows: who shares it only waits for another server, too.
func (s *RedisScriptStore) serverOf(ctx context.Context, key string) string {
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

// send implements [transport.Trips].Send.
func (s *RedisScriptStore) send(_ string, items []*item) {
	until := endOf(items[0])
	for _, i := range items[1:] {
		if end := endOf(i); end.After(until) {
			until = end
		}
	}
	ctx := s.trips.until.Context(until)
	if s.trips.scattered.Load() {
		s.pipelined(ctx, items)
	} else {
		s.together(ctx, s.client, items)
	}
}

// sendDirect implements [transport.Trips].Direct. A client that does not heed deadlines reads for as long as its ReadTimeout, and nothing but
// WithTimeout makes it read for less. That copy has no hooks; without it a lone caller would be slower by a quarter.
func (s *RedisScriptStore) sendDirect(_ string, items []*item) {
	client := s.client
	if s.trips.quick != nil {
		client = s.trips.quick
	}
	s.together(s.trips.until.Context(endOf(items[0])), client, items)
}

// endOf is when nobody waits for an item any more: the store's timeout is over, or the last of its callers has given up.
func endOf(i *item) time.Time {
	if i.Batch.until.Before(i.Deadline) {
		return i.Batch.until
	}
	return i.Deadline
}

// quickClient is a client each of whose reads ends with the context, or up to a tenth of the time that is left sooner. A script may take
// several: one that Redis does not know is sent again.
type quickClient struct {
	*redis.Client
	mu      sync.Mutex
	copy    *redis.Client
	timeout time.Duration // of its reads
}

// Process implements RedisClient.
func (q *quickClient) Process(ctx context.Context, cmd redis.Cmder) error {
	return q.until(timeOf(ctx)).Process(ctx, cmd)
}

// until is a copy of the client that reads until then: one serves many trips.
func (q *quickClient) until(until time.Time) *redis.Client {
	q.mu.Lock()
	defer q.mu.Unlock()
	left := time.Until(until)
	if q.copy == nil || q.timeout > left || q.timeout < left-left/10 {
		q.timeout = left - left/20
		q.copy = q.Client.WithTimeout(max(1, q.timeout)) // 0 is for ever
	}
	return q.copy
}

// together takes all batches in one call of the script.
func (s *RedisScriptStore) together(ctx context.Context, client RedisClient, items []*item) {
	buffer := s.trips.buffers.Get().(*tripBuffer)
	defer s.trips.buffers.Put(buffer)
	attempts := slices.Grow(buffer.attempts[:0], len(items))[:len(items)]
	keys := 2 * len(items)
	n := keys + headArgs + bucketArgs*len(items)
	args := slices.Grow(buffer.args[:0], n)[:n]
	buffer.attempts, buffer.args = attempts, args
	defer clear(args)
	defer clear(attempts)

	at := s.trips.asOf()
	earliest := int64(0)
	for i := range items {
		b, a := items[i].Batch, &attempts[i]
		a.batch, a.cached = b, s.cacheOf(b)
		deadline := b.deadline()
		if deadline != 0 && (earliest == 0 || deadline < earliest) {
			earliest = deadline
		}
		args[2*i], args[2*i+1] = a.cached.bucket, a.cached.lock
		a.encode(args[keys+headArgs+bucketArgs*i:], at, micros(deadline))
	}
	s.head(args[keys:], "", at, micros(earliest))
	sent := clock.Mono()
	reply, err := runBy(ctx, client, &applyScript, keys, args)
	if err != nil && len(items) > 1 && redis.HasErrorPrefix(err, "CROSSSLOT") {
		s.trips.scattered.Store(true) // it is a server of a cluster
		s.pipelined(ctx, items)
		return
	}
	received := clock.Mono()
	now := int64(0)
	if err == nil {
		now, err = parseReply(reply, len(items))
	}
	if err == nil {
		s.trips.heard(now, sent, received)
	}
	for i := range items {
		if err != nil {
			lost(items[i], attempts[i].cached, err)
		} else {
			s.answer(items[i], &attempts[i], now, reply[1+i])
		}
	}
}

// asOf is a time that the server's clock has surely reached; 0: none is known.
func (r *redisTrips) asOf() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return asOf(&r.server)
}

// heard notes what the server's clock showed in an answer.
func (r *redisTrips) heard(now int64, sent, received time.Duration) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.server.Heard(now, sent, received)
}

// pipelined takes the batches in one pipeline, which the client splits by server if it must.
func (s *RedisScriptStore) pipelined(ctx context.Context, items []*item) {
	if !s.trips.located.Load() {
		bucket, _ := s.keys(items[0].Batch.Name)
		s.trips.located.Store(s.serverOf(ctx, bucket) != "")
	}
	pipe := s.trips.pipeline()
	attempts := make([]attempt, len(items))
	calls := make([]script.Call, len(items))
	for i := range items {
		b, a := items[i].Batch, &attempts[i]
		a.batch, a.cached = b, s.cacheOf(b)
		server := b.server()
		at := asOf(&server)
		args := make([]string, 2+headArgs+bucketArgs)
		args[0], args[1] = a.cached.bucket, a.cached.lock
		deadline := micros(b.deadline())
		s.head(args[2:], "", at, deadline)
		a.encode(args[2+headArgs:], at, deadline)
		calls[i] = applyScript.Call(ctx, false, 2, args)
		_ = pipe.Process(ctx, calls[i])
	}
	_, _ = pipe.Exec(ctx) // each has its own error
	for i := range items {
		reply, err := calls[i].Result()
		now := int64(0)
		if err == nil {
			now, err = parseReply(reply, 1)
		}
		switch {
		case err == nil:
			s.answer(items[i], &attempts[i], now, reply[1])
		case redis.HasErrorPrefix(err, "NOSCRIPT"), script.NotExecuted(err):
			s.alone(items[i])
		default:
			script.Reload(ctx, s.client, err)
			lost(items[i], attempts[i].cached, err)
		}
	}
}

// answer brings a bucket's answer back.
func (s *RedisScriptStore) answer(i *item, a *attempt, now int64, answer string) {
	status, err := a.decode(now, answer)
	if status != decided {
		s.alone(i)
		return
	}
	i.Answer(&i.Batch.out, err)
}

// alone lets a batch wait for its bucket's lock, or try again, without the others.
func (s *RedisScriptStore) alone(i *item) {
	go func() {
		ctx, cancel := context.WithDeadline(context.Background(), i.Batch.until)
		defer cancel()
		err := s.decide(ctx, i.Batch)
		i.Answer(&i.Batch.out, err)
	}()
}

// lost tells that a batch got no answer.
func lost(i *item, cached *cachedState, err error) {
	cached.text = ""
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
		err = fmt.Errorf("%w: bucket %q: %w", ErrStoreTimeout, label(i.Batch.Name), err)
	}
	i.Batch.out = outcome{}
	i.Answer(&i.Batch.out, err)
}

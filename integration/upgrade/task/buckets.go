package task

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
)

// longestWay is how old the time of a decision may be when its request leaves: the library uses no older reply.
const longestWay = 100 * time.Millisecond

func store(client *redis.Client, name string) (tokenbucket.Store, error) {
	switch name {
	case "script":
		return tokenbucket.NewRedisScriptStore(client), nil
	case "lock":
		return tokenbucket.NewRedisStore(client), nil
	}
	return nil, fmt.Errorf("store %q: want script or lock", name)
}

// trips has the last round trips.
type trips struct {
	mu   sync.Mutex
	last []time.Duration
}

func (t *trips) note(trip tokenbucket.Trip) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last = append(t.last[max(0, len(t.last)-63):], trip.Elapsed)
}

// way returns by how many microseconds a decision may precede its request: the duration of a reply.
func (t *trips) way() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.last) == 0 {
		return 0
	}
	return min(slices.Max(t.last), longestWay).Microseconds()
}

// bucket has callers that reserve permits and wait until they are due.
func bucket(ctx context.Context, client *redis.Client, t *Task, tell func(Event)) error {
	s, err := store(client, t.Store)
	if err != nil {
		return err
	}
	var way trips
	l, err := tokenbucket.NewSmoothBursty(t.Name, t.Rate, tokenbucket.WithMaxPermits(t.Burst), tokenbucket.WithInitialPermits(t.Burst),
		tokenbucket.WithStore(s), tokenbucket.WithStoreTimeout(patience), tokenbucket.WithObserver(tokenbucket.Observer{Trip: way.note}))
	if err != nil {
		return err
	}
	calls := make([]int, t.Callers)
	t.callers(ctx, tell, func(caller int) error {
		calls[caller]++
		n := t.Sizes[(caller+calls[caller])%len(t.Sizes)]
		asked := Micros()
		r, err := l.TryReserve(context.Background(), n, t.Timeout)
		if err != nil {
			return err
		}
		if !r.OK() {
			time.Sleep(min(r.RetryAfter(), 50*time.Millisecond))
			return nil
		}
		granted := Micros()
		if t.CancelEvery > 0 && calls[caller]%t.CancelEvery == 0 && r.Delay() > 0 {
			return r.Cancel(context.Background())
		}
		<-r.Ready()
		// By the server's clock the permits fell due in between: not before the wait that began with the decision, and not after the one that
		// began with the reply.
		used := Micros()
		due := asked + r.Delay().Microseconds()
		to := min(used, due-asked+granted)
		tell(Event{What: Used, Permits: n, From: min(due-way.way(), to), To: to})
		return nil
	})
	return nil
}

// line has callers that wait for one permit each, however long it takes.
func line(ctx context.Context, client *redis.Client, t *Task, tell func(Event)) error {
	s, err := store(client, t.Store)
	if err != nil {
		return err
	}
	l, err := tokenbucket.NewSmoothBursty(t.Name, t.Rate, prioritized(t.Lowest, []tokenbucket.Option{tokenbucket.WithMaxPermits(t.Burst),
		tokenbucket.WithStore(s), tokenbucket.WithStoreTimeout(patience)})...)
	if err != nil {
		return err
	}
	t.callers(ctx, tell, func(int) error {
		asked := Micros()
		if _, err := l.Acquire(ctx, 1); err != nil {
			return err
		}
		tell(Event{What: Used, Permits: 1, From: asked, To: Micros()})
		return nil
	})
	return nil
}

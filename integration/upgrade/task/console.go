package task

import (
	"context"
	"encoding/json"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/registry"
)

// publish makes a number of calls to a row that grants all of them, and publishes the counts until it is ended.
func publish(ctx context.Context, client *redis.Client, t *Task, tell func(Event)) error {
	s, err := store(client, t.Store)
	if err != nil {
		return err
	}
	meter := fleet.NewMeter()
	limits, err := registry.New(registry.Static{limitOf(t)}, s, registry.WithLimiterOptions(
		prioritized(t.Lowest, []tokenbucket.Option{tokenbucket.WithInitialPermits(t.Burst), tokenbucket.WithStoreTimeout(patience), tokenbucket.WithObserver(meter.Observer())})...),
		registry.WithBypassHook(meter.Bypassed), registry.WithHook(meter.Loaded))
	if err != nil {
		return err
	}
	defer limits.Close()
	meter.Follow(limits)
	publisher, err := fleet.NewPublisher(client, meter)
	if err != nil {
		return err
	}
	for range t.Calls {
		a, err := limits.Enter(ctx, t.Name)
		if err != nil {
			return err
		}
		a.Leave()
	}
	tell(Event{What: Done, Text: publisher.ID()})
	<-ctx.Done()
	limited, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return publisher.Close(limited)
}

// View is what a console shows of a fleet, as far as both releases show it. It is the Text of a Line.
type View struct {
	Instances map[string]int64 // calls of the limit that passed, by instance
	Rate      float64          // of the limit, as its row says
	Skipped   []string         // what could not be read
	History   int64            // calls of the limit that passed, by the history
	Events    []string         // kinds of events
}

// read sends an event for each snapshot of a console, until it is ended.
func read(ctx context.Context, client *redis.Client, t *Task, tell func(Event)) error {
	reader := fleet.NewReader(client)
	for ctx.Err() == nil {
		snapshot, err := reader.Snapshot(ctx)
		if err != nil {
			return ended(ctx, err)
		}
		v := View{Instances: map[string]int64{}}
		for i := range snapshot.Instances {
			instance := &snapshot.Instances[i]
			if l := instance.Limits[t.Name]; l != nil {
				v.Instances[instance.ID], v.Rate = l.Through(), l.Config.Rate
			}
		}
		for _, s := range snapshot.Skipped {
			v.Skipped = append(v.Skipped, s.Error())
		}
		points, err := reader.History(ctx, t.Name, snapshot.At.Add(-time.Hour))
		if err != nil {
			return ended(ctx, err)
		}
		for i := range points {
			v.History += points[i].Granted
		}
		events, err := reader.Events(ctx, snapshot.At.Add(-time.Hour))
		if err != nil {
			return ended(ctx, err)
		}
		for i := range events {
			v.Events = append(v.Events, string(events[i].Kind))
		}
		text, err := json.Marshal(v)
		if err != nil {
			return err
		}
		tell(Event{What: Line, Text: string(text)})
		select {
		case <-ctx.Done():
		case <-time.After(200 * time.Millisecond):
		}
	}
	return nil
}

// ended returns an error unless it comes from the end of the context.
func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

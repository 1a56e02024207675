// Package task is the work of one process of a fleet during a rolling update. It is compiled twice: with the library of this checkout, and,
// with the build tag "previous", in the source of the previous release. So it may use only the API that both have; calls with different
// names are in api.go and api_previous.go.
package task

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

// Env is the environment variable that holds the Job of a process.
const Env = "TOKENBUCKET_UPGRADE_JOB"

// Job is what a process does until it is ended: all of its tasks at once.
type Job struct {
	Redis string // the address of a server
	Tasks []Task
}

// Task is a part of a Job. Fields that its kind does not use stay zero.
type Task struct {
	Kind Kind
	// Name is the bucket, semaphore, window or row. Store is "script" or "lock"; of a semaphore also "redis" or "postgres".
	Name, Store string
	// DSN of a database: MariaDB for tables, PostgreSQL for semaphores.
	DSN string
	// View is through which the previous release reads the table, if that has other names of columns than it knows.
	View    string
	Callers int
	// Rate and Burst of a bucket. Callers ask for Sizes permits in turn, and give back every CancelEvery-th grant before it is due.
	Rate, Burst float64
	Sizes       []int
	CancelEvery int
	// Lowest is whether callers in a line, or of a publishing gateway, have the lowest priority.
	Lowest bool
	// Timeout of a reservation.
	Timeout time.Duration
	// All callers rest for Rest every RestEvery, all processes at the same time, so that the bucket fills up.
	RestEvery, Rest time.Duration
	// Limit is the number of permits of a semaphore, or of calls in a window. Resolution is the length of a window's sub-intervals.
	Limit              int
	Window, Resolution time.Duration
	// Interval between two loads of a table; 0 is the default.
	Interval time.Duration
	// Calls is the number of calls that a publishing gateway makes.
	Calls int
}

// Kind selects what a task does.
type Kind string

const (
	Bucket    Kind = "bucket"    // reserves permits
	Waiting   Kind = "waiting"   // waits in line for permits
	Gateway   Kind = "gateway"   // enters a row of a table, by a registry
	Table     Kind = "table"     // reads a table and a switch once
	Create    Kind = "create"    // creates a table and a switch
	Semaphore Kind = "semaphore" // holds places
	Window    Kind = "window"    // counts calls
	Publish   Kind = "publish"   // publishes its figures for consoles
	Read      Kind = "read"      // reads the figures of the fleet, as a console does
)

// Event is a line of a process's output.
type Event struct {
	Of   string `json:",omitempty"` // the Name of the task
	What What
	// Permits that fell due, or were held, or calls that were counted, between two times by Micros.
	Permits  int   `json:",omitempty"`
	From, To int64 `json:",omitempty"`
	Text     string
}

// What is the kind of an event.
type What string

const (
	Used   What = "used"   // permits
	Failed What = "failed" // Text is the error
	Line   What = "line"   // Text is a line of a snapshot or of a table
	Done   What = "done"   // a task without callers has done its part
	Late   What = "late"   // a sleeper was woken 10 ms late or more, between From and To
)

// origin makes Micros a clock that no step of the system's clock moves.
var origin = time.Now()

// Micros is the clock of a process, in microseconds since 1970. Processes of one machine agree within about a millisecond.
func Micros() int64 { return origin.UnixMicro() + time.Since(origin).Microseconds() }

var kinds = map[Kind]func(ctx context.Context, client *redis.Client, t *Task, tell func(Event)) error{
	Bucket: bucket, Waiting: line, Gateway: gateway, Table: table, Create: create, Semaphore: places, Window: window, Publish: publish, Read: read,
}

// patience is a timeout that a busy machine does not exceed.
const patience = time.Minute

// Run does a job. It is for worker.Main.
func Run(ctx context.Context, j *Job, tell func(Event)) error {
	client := redis.NewClient(&redis.Options{Addr: j.Redis, ReadTimeout: 2 * patience})
	defer func() { _ = client.Close() }()
	var running sync.WaitGroup
	running.Go(func() { lateness(ctx, tell) })
	errs := make(chan error, len(j.Tasks))
	for i := range j.Tasks {
		running.Go(func() {
			t := &j.Tasks[i]
			do := kinds[t.Kind]
			if do == nil {
				errs <- fmt.Errorf("unknown task %q", t.Kind)
				return
			}
			err := do(ctx, client, t, func(e Event) { e.Of = t.Name; tell(e) })
			if err != nil {
				tell(Event{Of: t.Name, What: Failed, Text: err.Error()})
				errs <- fmt.Errorf("%s %s: %w", t.Kind, t.Name, err)
			}
		})
	}
	running.Wait()
	close(errs)
	return <-errs
}

// lateness sends events of late awakenings of this process.
func lateness(ctx context.Context, tell func(Event)) {
	const pause = 2 * time.Millisecond
	for ctx.Err() == nil {
		due := Micros() + pause.Microseconds()
		time.Sleep(pause)
		if now := Micros(); now-due >= 10_000 {
			tell(Event{What: Late, From: due, To: now})
		}
	}
}

// callers runs a function in the task's number of goroutines, again and again. A failed call is an event, and the next one waits a little.
func (t *Task) callers(ctx context.Context, tell func(Event), call func(caller int) error) {
	var all sync.WaitGroup
	for i := range t.Callers {
		all.Go(func() {
			for ctx.Err() == nil {
				t.rest()
				if err := call(i); err != nil && ctx.Err() == nil {
					tell(Event{What: Failed, Text: err.Error()})
					time.Sleep(50 * time.Millisecond)
				}
			}
		})
	}
	all.Wait()
}

// rest sleeps if all processes rest now.
func (t *Task) rest() {
	if t.RestEvery <= 0 {
		return
	}
	if in := time.Duration(Micros()) * time.Microsecond % t.RestEvery; in < t.Rest {
		time.Sleep(t.Rest - in)
	}
}

package slidingwindow

import (
	"context"
	_ "embed"
	"fmt"
	"math/rand/v2"
	"strconv"
	"time"

	"github.com/go-tokenbucket/tokenbucket/internal/script"
	"github.com/go-tokenbucket/tokenbucket/internal/step"
	"github.com/go-tokenbucket/tokenbucket/internal/waiting"
)

//go:embed lua/apply.lua
var applySource string

var applyScript = script.New(applySource)

// coordinator is the part of a limiter in Redis that runs in each process: a machine, and the process that runs it. window.mu guards the
// machine.
type coordinator struct {
	machine
	window  *window
	client  RedisClient
	process *waiting.Process[*call, *flight, []string]
	server  func() int64 // see options
}

func newCoordinator(w *window, o *options, key string) *coordinator {
	c := &coordinator{
		machine: machine{
			config: config{
				name: w.name, key: key, sender: strconv.FormatUint(rand.Uint64(), 36), observer: o.observer,
				policy: policy{timeout: o.timeout, failure: o.policy, local: o.local},
			},
			rule: w.rule, limit: w.limit.Load(), version: o.version, random: *rand.NewPCG(rand.Uint64(), rand.Uint64()),
			queue: queue{most: o.waiters}, line: queue{most: o.waiters},
		},
		window: w, client: o.client, server: o.server,
	}
	p := waiting.Config[*call, *flight, []string]{
		Machine: c, Mu: &w.mu, Clock: o.clock, Timeout: o.timeout, Failure: c.failure,
		Send: func(ctx context.Context, b *flight) ([]string, error) { return c.send(ctx, c.client, b) },
	}
	if bounded := script.Bounded(o.client); bounded != nil {
		p.Direct = func(ctx context.Context, b *flight) ([]string, error) { return c.send(ctx, bounded, b) }
	}
	c.process = waiting.New(p)
	return c
}

// Tick is the machine's Tick. It publishes the values that are read without the lock.
func (c *coordinator) Tick(moment step.Moment, out *step.Out) step.Next {
	next := c.machine.Tick(moment, out)
	if c.window.limit.Load() != c.limit {
		c.window.limit.Store(c.limit)
	}
	c.window.publish(c.full)
	return next
}

// Build is the machine's Build.
func (c *coordinator) Build(moment step.Moment, out *step.Out) (*flight, bool) {
	if c.server != nil {
		c.scriptTime = decimal(c.server())
	}
	return c.machine.Build(moment, out)
}

// send runs the script of a batch. With a pool that is used up, it stops waiting for a connection early enough to see whether Redis replies.
func (c *coordinator) send(ctx context.Context, client script.Client, b *flight) ([]string, error) {
	run := ctx
	if script.PoolUsedUp(client, c.key) {
		var cancel context.CancelFunc
		run, cancel = context.WithTimeout(ctx, c.policy.timeout/2)
		defer cancel()
	}
	reply, err := applyScript.RunTogether(run, client, b.keys, b.args...)
	if b.keys > 1 && script.KeysApart(err) {
		b.goAlone()
		reply, err = applyScript.Run(run, client, b.keys, b.args...)
	}
	switch {
	case err == nil:
	case script.Starved(ctx, client, c.key, err):
		err = fmt.Errorf("%w: %w", errStarved, err)
	default:
		err = c.explain(ctx, client, err)
	}
	return reply, err
}

// do makes a call.
func (c *coordinator) do(ctx context.Context, q *call) (verdict, error) {
	if err := c.process.Do(ctx, q); err != nil {
		return verdict{}, err
	}
	return q.verdict, q.err
}

// standing implements Limiter.standing.
func (c *coordinator) standing(n int64) (limit, used int64, wait time.Duration) {
	c.process.Step(func(moment step.Moment, _ *step.Out) {
		limit, used, wait = c.machine.standing(n, c.now(moment.Local), moment)
	})
	return limit, used, wait
}

// reconfigure implements Limiter.Reconfigure.
func (c *coordinator) reconfigure(limit, version int64, failure FailurePolicy) {
	c.process.Step(func(step.Moment, *step.Out) {
		c.policy.failure = failure
		c.limit, c.version = c.newest(limit, version)
		c.full, c.lookAt = span{}, 0
	})
}

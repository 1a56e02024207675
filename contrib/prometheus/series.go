package prometheus

import (
	"maps"
	"strconv"
	"strings"
	"sync/atomic"

	prom "github.com/prometheus/client_golang/prometheus"

	"github.com/go-tokenbucket/tokenbucket"
)

// series are those of one value of the label bucket. Looking a child up by its labels costs more than counting, and
// allocates, so every child is looked up once, when it is first needed: a bucket that never fails has no series of
// failures.
type series struct {
	c     *collector
	label string

	decisions [outcomes][deciders][2]atomic.Pointer[answers]
	waits     [2]atomic.Pointer[prom.Observer]
	failures  [kinds]atomic.Pointer[prom.Counter]
	leases    [2]atomic.Pointer[prom.Counter]
}

type answers struct{ calls, permits prom.Counter }

const (
	granted = iota
	refused
	failed
	outcomes

	deciders = int(tokenbucket.ByCheck) + 2 // the last one is "unknown": a decider that came after this module
)

var outcomeNames = [outcomes]string{"granted", "refused", "failed"}

// bucket returns the series of a label value. It takes no lock but for a value that is new: the map is never changed, only
// replaced by a larger one.
func (c *collector) bucket(label string) *series {
	known := *c.series.Load()
	if s := known[label]; s != nil {
		return s
	}
	if len(known) >= c.maxBuckets {
		return c.further
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	known = *c.series.Load()
	if s := known[label]; s != nil {
		return s
	}
	if len(known) >= c.maxBuckets {
		return c.further
	}
	label = strings.Clone(label) // it may be part of something large
	s := &series{c: c, label: strings.ToValidUTF8(label, "\uFFFD")}
	next := maps.Clone(known)
	next[label] = s
	c.series.Store(&next)
	return s
}

func (s *series) decided(d *tokenbucket.Decision) {
	outcome := refused
	switch {
	case d.Err != nil:
		outcome = failed
		s.failure(kindOf(d.Err)).Inc()
	case d.Granted:
		outcome = granted
		s.wait(d.Shadow).Observe(d.Wait.Seconds())
	}
	a := s.answered(outcome, d.By, d.Shadow)
	a.calls.Inc()
	if d.Permits > 0 && (outcome != failed || d.By != tokenbucket.ByCheck) { // else they may be any number
		a.permits.Add(float64(d.Permits))
	}
}

func (s *series) leased(u tokenbucket.LeaseUse) {
	used := min(max(0, u.Used), max(0, u.Permits))
	s.lease(0, "used").Add(float64(used))
	s.lease(1, "unused").Add(float64(max(0, u.Permits) - used))
}

func (s *series) answered(outcome int, by tokenbucket.Decider, shadow bool) *answers {
	return once(&s.decisions[outcome][min(int(by), deciders-1)][index(shadow)], func() answers {
		labels := []string{s.label, outcomeNames[outcome], by.String(), strconv.FormatBool(shadow)}
		return answers{s.c.decisions.WithLabelValues(labels...), s.c.permits.WithLabelValues(labels...)}
	})
}

func (s *series) wait(shadow bool) prom.Observer {
	return *once(&s.waits[index(shadow)], func() prom.Observer {
		return s.c.waits.WithLabelValues(s.label, strconv.FormatBool(shadow))
	})
}

func (s *series) failure(k kind) prom.Counter {
	return *once(&s.failures[k], func() prom.Counter { return s.c.failures.WithLabelValues(s.label, k.String()) })
}

func (s *series) lease(i int, use string) prom.Counter {
	return *once(&s.leases[i], func() prom.Counter { return s.c.leases.WithLabelValues(s.label, use) })
}

// once returns what p points to, made by the first call. Two first calls at once may both make it: the vectors return the
// same child to both.
func once[T any](p *atomic.Pointer[T], create func() T) *T {
	v := p.Load()
	if v == nil {
		made := create()
		v = &made
		p.Store(v)
	}
	return v
}

func index(b bool) int {
	if b {
		return 1
	}
	return 0
}

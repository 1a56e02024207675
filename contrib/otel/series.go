package otel

import (
	"context"
	"maps"
	"strings"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"

	"github.com/go-tokenbucket/tokenbucket"
)

// series are the attributes of one value of tokenbucket.bucket, each set made when it is first needed.
type series struct {
	m    *measures
	name string

	decisions [refused + 1][deciders][2]atomic.Pointer[labels]
	failures  [kinds][deciders][2]atomic.Pointer[labels]
	waits     [2]atomic.Pointer[labels]
	leases    [2]atomic.Pointer[labels]
}

const (
	granted = iota
	refused
	failed
	outcomes

	deciders = int(tokenbucket.ByCheck) + 2 // the last one is "unknown": a decider that came after this module
)

var outcomeNames = [outcomes]string{"granted", "refused", "failed"}

func outcomeOf(d *tokenbucket.Decision) int {
	switch {
	case d.Err != nil:
		return failed
	case d.Granted:
		return granted
	}
	return refused
}

// bucket returns the series of a value. It takes no lock but for a value that is new: the map is never changed, only
// replaced by a larger one.
func (m *measures) bucket(name string) *series {
	known := *m.series.Load()
	if s := known[name]; s != nil {
		return s
	}
	if len(known) >= m.maxBuckets {
		return m.further
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	known = *m.series.Load()
	if s := known[name]; s != nil {
		return s
	}
	if len(known) >= m.maxBuckets {
		return m.further
	}
	name = strings.Clone(name) // it may be part of something large
	s := &series{m: m, name: strings.ToValidUTF8(name, "\uFFFD")}
	next := maps.Clone(known)
	next[name] = s
	m.series.Store(&next)
	return s
}

func (s *series) decided(ctx context.Context, d *tokenbucket.Decision) {
	outcome := outcomeOf(d)
	if outcome == granted {
		s.m.waits.Record(ctx, d.Wait.Seconds(), s.wait(d.Shadow).record...)
	}
	l := s.decision(outcome, d)
	s.m.decisions.Add(ctx, 1, l.add...)
	if d.Permits > 0 && (outcome != failed || d.By != tokenbucket.ByCheck) { // else they may be any number
		s.m.permits.Add(ctx, int64(d.Permits), l.add...)
	}
}

func (s *series) leased(u tokenbucket.LeaseUse) {
	used := min(max(0, u.Used), max(0, u.Permits))
	ctx := context.Background()
	s.m.leases.Add(ctx, int64(used), s.lease(0, "used").add...)
	s.m.leases.Add(ctx, int64(max(0, u.Permits)-used), s.lease(1, "unused").add...)
}

func (s *series) labels(attributes ...attribute.KeyValue) *labels {
	if s.name != "" {
		attributes = append(attributes, bucketKey.String(s.name))
	}
	return s.m.labels(attributes...)
}

func (s *series) decision(outcome int, d *tokenbucket.Decision) *labels {
	by, shadow := min(int(d.By), deciders-1), one(d.Shadow)
	if outcome == failed {
		k := kindOf(d.Err)
		return once(&s.failures[k][by][shadow], func() *labels {
			return s.labels(outcomeKey.String(outcomeNames[failed]),
				deciderKey.String(d.By.String()), shadowKey.Bool(d.Shadow), k.attribute())
		})
	}
	return once(&s.decisions[outcome][by][shadow], func() *labels {
		return s.labels(outcomeKey.String(outcomeNames[outcome]),
			deciderKey.String(d.By.String()), shadowKey.Bool(d.Shadow))
	})
}

func (s *series) wait(shadow bool) *labels {
	return once(&s.waits[one(shadow)], func() *labels { return s.labels(shadowKey.Bool(shadow)) })
}

func (s *series) lease(i int, use string) *labels {
	return once(&s.leases[i], func() *labels { return s.labels(useKey.String(use)) })
}

// once returns what p points to, made by the first call. Two first calls at once may both make it: what they make is the
// same.
func once(p *atomic.Pointer[labels], create func() *labels) *labels {
	l := p.Load()
	if l == nil {
		l = create()
		p.Store(l)
	}
	return l
}

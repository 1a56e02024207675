package prometheus

import (
	"strconv"
	"sync/atomic"

	prom "github.com/prometheus/client_golang/prometheus"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/telemetry"
)

// series are those of one value of the label bucket. Looking a child up by its labels costs more than counting, and
// allocates, so every child is looked up once, when it is first needed: a bucket that never fails has no series of
// failures. The vectors return the same child to whoever looks it up.
type series struct {
	c     *collector
	label string

	decisions [telemetry.Outcomes][telemetry.Deciders][2]atomic.Pointer[answers]
	waits     [2]atomic.Pointer[prom.Observer]
	failures  [telemetry.Kinds][2]atomic.Pointer[prom.Counter]
	leases    [2]atomic.Pointer[prom.Counter]
}

type answers struct{ calls, permits prom.Counter }

func (s *series) decided(d *tokenbucket.Decision) {
	outcome := telemetry.OutcomeOf(d)
	switch outcome {
	case telemetry.Failed:
		s.failure(telemetry.KindOf(d.Err), d.Shadow).Inc()
	case telemetry.Granted:
		s.wait(d.Shadow).Observe(d.Wait.Seconds())
	}
	a := s.answered(outcome, d)
	a.calls.Inc()
	if telemetry.Counts(d) {
		a.permits.Add(float64(d.Permits))
	}
}

func (s *series) leased(u tokenbucket.LeaseUse) {
	used, unused := telemetry.Lease(u)
	s.lease(0, "used").Add(float64(used))
	s.lease(1, "unused").Add(float64(unused))
}

func (s *series) answered(outcome telemetry.Outcome, d *tokenbucket.Decision) *answers {
	return telemetry.Once(&s.decisions[outcome][telemetry.Decider(d)][telemetry.Index(d.Shadow)], func() answers {
		labels := []string{s.label, outcome.String(), d.By.String(), strconv.FormatBool(d.Shadow)}
		return answers{s.c.decisions.WithLabelValues(labels...), s.c.permits.WithLabelValues(labels...)}
	})
}

func (s *series) wait(shadow bool) prom.Observer {
	return *telemetry.Once(&s.waits[telemetry.Index(shadow)], func() prom.Observer {
		return s.c.waits.WithLabelValues(s.label, strconv.FormatBool(shadow))
	})
}

func (s *series) failure(k telemetry.Kind, shadow bool) prom.Counter {
	return *telemetry.Once(&s.failures[k][telemetry.Index(shadow)], func() prom.Counter {
		return s.c.failures.WithLabelValues(s.label, k.String(), strconv.FormatBool(shadow))
	})
}

func (s *series) lease(i int, use string) prom.Counter {
	return *telemetry.Once(&s.leases[i], func() prom.Counter { return s.c.leases.WithLabelValues(s.label, use) })
}

package schedule

import "github.com/go-tokenbucket/tokenbucket/internal/permit"

// walks rate-limits full scans of the queue. Only mixed request sizes spread over several segments need one: which waiters are covered, and
// which permits are spare, shows only if each waiter takes its permits in turn. Changes of the queue and the passing of time earn steps.
// Until there are enough for a scan, uncovered waiters ask the store, and spare permits are refunded later.
type walks struct {
	plan   []segment // the segments after the last walk
	steps  int64     // balance of steps; negative after a walk that was not affordable
	since  int64     // time up to which steps were earned
	futile mark      // state at the last walk that found nothing to refund
	total  int64     // steps of all walks
}

// mark is the state that decides what a walk finds to refund.
type mark struct {
	changes uint64
	spare   int64
	last    *segment
	end     permit.Balance
}

const (
	perChange     = 64 // steps earned by a change of the queue
	microsPerStep = 8  // microseconds that earn a step; the step itself takes about a hundredth of that
)

// earn adds the steps of one change of the queue.
func (w *walks) earn() { w.steps += perChange }

// spend subtracts the steps of a walk.
func (w *walks) spend(steps int) {
	w.steps -= int64(steps)
	w.total += int64(steps)
}

// mixed reports whether only a walk shows which waiters are covered.
func (s *Schedule[V]) mixed() bool { return s.large > 0 && len(s.segments) > 1 }

// mayWalk reports whether there are enough steps for a walk. The balance is limited to two walks.
func (s *Schedule[V]) mayWalk() bool {
	w, need := &s.walks, int64(s.waiters+len(s.segments))
	if earned := (s.now - w.since) / microsPerStep; earned > 0 {
		w.steps += earned
		w.since = s.now
	}
	w.steps = min(w.steps, 2*need)
	return w.steps >= need
}

// recover determines again which waiters are covered, by a walk. Waiters whose permits would be too late leave the queue.
func (s *Schedule[V]) recover() {
	w, steps := s.walk(func(w *Waiter[V], g *segment) bool {
		due := g.due(w.Permits)
		if s.tooLate(w, due) && !s.InTurns {
			s.expire(w, due)
			return false
		}
		if w.state == uncovered {
			s.promote(w)
		}
		w.due = due
		return true
	})
	s.walks.spend(steps)
	if w != nil && w.state == covered {
		s.askAt = 0
	}
	s.demote(w)
}

// walk simulates how waiters are served: each takes its permits from the first segment that has enough, if take returns true. It returns
// the first waiter for which no segment has enough, and the number of steps.
func (s *Schedule[V]) walk(take func(w *Waiter[V], g *segment) bool) (first *Waiter[V], steps int) {
	plan := s.walks.plan[:0]
	for _, g := range s.segments {
		plan = append(plan, *g)
	}
	s.walks.plan = plan
	begin := 0
	steps = len(plan)
	for w := s.head; w != nil; {
		for begin < len(plan) && plan[begin].left == 0 {
			begin++
		}
		var g *segment
		steps++
		for i := begin; i < len(plan) && g == nil; i++ {
			steps++
			if p := &plan[i]; p.left >= w.Permits {
				if p.take(p.lapsing(max(p.from, p.came(w.Came)))); p.left >= w.Permits {
					g = p
				}
			}
		}
		if g == nil {
			return w, steps
		}
		behind := w.next
		if take(w, g) {
			g.take(w.Permits)
		}
		w = behind
	}
	return nil, steps
}

package schedule

// walks bounds how often the whole line is gone through, for the sake of those of different sizes who wait for several segments: which
// of them the segments suffice for, and what is left over, only shows if each takes what it will. Each change of the line and each
// while earns some steps. Until there are enough, who is not covered asks the store, and what is left over goes back later.
type walks struct {
	plan  []segment // what the last left of the segments
	steps int64     // earned; below 0: more were taken
	since int64     // until then time has earned them
	vain  mark      // when a walk has found nothing to give back
	taken int64     // altogether
}

// mark is all by which a walk may find something to give back that one before has not.
type mark struct {
	changes uint64
	spare   int64
	last    *segment
	end     Balance
}

const (
	perChange     = 64 // steps that each change earns
	microsPerStep = 8  // a step takes about 0.01 of it
)

func (w *walks) earn() { w.steps += perChange }

func (w *walks) spend(steps int) {
	w.steps -= int64(steps)
	w.taken += int64(steps)
}

// mixed tells that only a walk shows who is covered.
func (s *Schedule[V]) mixed() bool { return s.large > 0 && len(s.segments) > 1 }

// mayWalk tells whether enough steps were earned. More than enough are not saved up.
func (s *Schedule[V]) mayWalk() bool {
	w, need := &s.walks, int64(s.waiters+len(s.segments))
	if earned := (s.now - w.since) / microsPerStep; earned > 0 {
		w.steps += earned
		w.since = s.now
	}
	w.steps = min(w.steps, 2*need)
	return w.steps >= need
}

// recover finds anew who is covered, going through the line as the waiters will: each takes from the first segment that has
// enough. Whom that would serve too late leaves the line.
func (s *Schedule[V]) recover() {
	w := s.walk(func(w *Waiter[V], g *segment) bool {
		due := g.due(w.Permits)
		if s.tooLate(w, due) {
			s.expire(w, due)
			return false
		}
		if w.state == uncovered {
			s.promote(w)
		}
		w.due, w.known = due, s.changes+1
		return true
	})
	if w != nil && w.state == covered {
		s.askAt = 0
	}
	s.demote(w)
}

// walk goes through the line as the waiters will: each takes from the first segment that has enough for it, if take agrees. It
// returns the first for whom none has.
func (s *Schedule[V]) walk(take func(w *Waiter[V], g *segment) bool) *Waiter[V] {
	plan := s.walks.plan[:0]
	for _, g := range s.segments {
		plan = append(plan, *g)
	}
	s.walks.plan = plan
	begin, steps := 0, len(plan)
	defer func() { s.walks.spend(steps) }()
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
			return w
		}
		behind := w.next
		if take(w, g) {
			g.take(w.Permits)
		}
		w = behind
	}
	return nil
}

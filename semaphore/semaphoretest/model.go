package semaphoretest

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// model is what semaphore.Backend says, in its plainest form: with the times of the reports as the clock.
type model struct {
	fence, ticket, seen int64
	permits             int // that somebody has set
	held                []modelLease
	queue               []modelWaiter // by ticket
	idle                []modelWaiter
	waiting             map[string]*modelProcess
}

type modelLease struct {
	id      string
	permits int
	fence   int64
	expires int64
}

type modelWaiter struct {
	id, process string
	permits     int
	ticket      int64
}

type modelProcess struct{ until, told int64 }

// told is a grant for another process.
type modelTold struct {
	process string
	grant   semaphore.Grant
}

func (m *model) used() (n int) {
	for _, l := range m.held {
		n += l.permits
	}
	return n
}

func (m *model) holder(id string) *modelLease {
	i := slices.IndexFunc(m.held, func(l modelLease) bool { return l.id == id })
	if i < 0 {
		return nil
	}
	return &m.held[i]
}

// shift is what Place.SetBack does.
func (m *model) shift(d int64) {
	m.seen += d
	for i := range m.held {
		m.held[i].expires += d
	}
	for _, p := range m.waiting {
		p.until += d
	}
}

// apply decides a batch at a time that a report gives; the error is what is wrong with that.
func (m *model) apply(b *semaphore.Batch, now int64) (*semaphore.Report, []modelTold, error) {
	if back := m.seen - now; back > 2_000_000 {
		m.shift(-back)
	} else if back > 0 {
		return nil, nil, fmt.Errorf("time went back by %d µs, where it should stand still", back)
	}
	m.seen = now
	if b.SetPermits != 0 {
		m.permits = b.SetPermits
	}
	total := m.permits
	if total == 0 {
		total = b.Permits
	}
	r := &semaphore.Report{Now: now, Permits: total}
	m.held = slices.DeleteFunc(m.held, func(l modelLease) bool { return l.expires <= now })
	for _, id := range b.Leave {
		r.Left = append(r.Left, m.leave(id))
	}
	for _, id := range b.Renew {
		l := m.holder(id)
		if l != nil {
			l.expires = max(l.expires, now+b.LeaseMicros)
		}
		r.Renewed = append(r.Renewed, l != nil)
	}
	own := m.waiting[b.Process]
	r.Fresh = own == nil
	if own != nil {
		r.Told = own.told
	}
	told := m.admit(b, now, total, r)
	for _, e := range b.Enter {
		r.Entered = append(r.Entered, m.enter(b, e, now, total))
	}
	delete(m.waiting, b.Process)
	if b.PatienceMicros != 0 {
		m.waiting[b.Process] = &modelProcess{now + b.PatienceMicros, r.Told}
	}
	for _, l := range m.held {
		if r.Earliest == 0 || l.expires < r.Earliest {
			r.Earliest = l.expires
		}
	}
	return r, told, nil
}

func (m *model) leave(id string) semaphore.Standing {
	before := len(m.held) + len(m.queue) + len(m.idle)
	held := len(m.held)
	m.held = slices.DeleteFunc(m.held, func(l modelLease) bool { return l.id == id })
	m.queue = slices.DeleteFunc(m.queue, func(w modelWaiter) bool { return w.id == id })
	m.idle = slices.DeleteFunc(m.idle, func(w modelWaiter) bool { return w.id == id })
	switch {
	case len(m.held) < held:
		return semaphore.Holding
	case len(m.held)+len(m.queue)+len(m.idle) < before:
		return semaphore.Waiting
	}
	return semaphore.Gone
}

// admit lets in who waits, and returns whom to tell.
func (m *model) admit(b *semaphore.Batch, now int64, total int, r *semaphore.Report) (told []modelTold) {
	listens := func(process string) bool {
		if process == b.Process {
			return b.PatienceMicros != 0
		}
		p := m.waiting[process]
		if p != nil && p.until < now {
			delete(m.waiting, process)
			return false
		}
		return p != nil
	}
	tell := func(w modelWaiter, g semaphore.Grant) {
		if w.process == b.Process {
			r.Grants = append(r.Grants, g)
			return
		}
		m.waiting[w.process].told++
		told = append(told, modelTold{w.process, g})
	}
	for len(m.queue) > 0 {
		w := m.queue[0]
		alive := listens(w.process)
		if alive && w.permits <= total && m.used()+w.permits > total {
			break
		}
		m.queue = m.queue[1:]
		if alive && w.permits > total {
			tell(w, semaphore.Grant{ID: w.id, Outcome: semaphore.TooMany})
		} else if alive {
			l := m.grant(w.id, w.permits, now, b.LeaseMicros)
			tell(w, semaphore.Grant{ID: w.id, Outcome: semaphore.Granted, Fence: l.fence, Expires: l.expires})
		}
	}
	if len(m.held) == 0 {
		for _, w := range m.idle {
			if listens(w.process) {
				tell(w, semaphore.Grant{ID: w.id, Outcome: semaphore.Granted})
			}
		}
		m.idle = nil
	}
	return told
}

func (m *model) grant(id string, permits int, now, lease int64) modelLease {
	m.fence = max(m.fence+1, now)
	l := modelLease{id, permits, m.fence, now + lease}
	m.held = append(m.held, l)
	return l
}

func (m *model) enter(b *semaphore.Batch, e semaphore.Entry, now int64, total int) semaphore.Answer {
	waits := slices.IndexFunc(m.queue, func(w modelWaiter) bool { return w.id == e.ID })
	l := m.holder(e.ID)
	switch {
	case e.Permits == 0 && len(m.held) == 0:
		return semaphore.Answer{Outcome: semaphore.Granted}
	case e.Permits == 0:
		if !slices.ContainsFunc(m.idle, func(w modelWaiter) bool { return w.id == e.ID }) {
			m.idle = append(m.idle, modelWaiter{id: e.ID, process: b.Process})
		}
		return semaphore.Answer{Outcome: semaphore.Queued}
	case l != nil:
		l.expires = max(l.expires, now+b.LeaseMicros)
		return semaphore.Answer{Outcome: semaphore.Granted, Fence: l.fence}
	case e.Permits > total:
		return semaphore.Answer{Outcome: semaphore.TooMany}
	case waits >= 0:
		return semaphore.Answer{Outcome: semaphore.Queued, Ticket: m.queue[waits].ticket}
	case m.used()+e.Permits <= total && (len(m.queue) == 0 || e.Ticket != 0 && e.Ticket < m.queue[0].ticket):
		return semaphore.Answer{Outcome: semaphore.Granted, Fence: m.grant(e.ID, e.Permits, now, b.LeaseMicros).fence}
	case !e.Wait:
		return semaphore.Answer{Outcome: semaphore.Refused}
	}
	ticket := e.Ticket
	if ticket == 0 {
		ticket = max(m.ticket+1, now)
	}
	m.ticket = max(m.ticket, ticket)
	m.queue = append(m.queue, modelWaiter{e.ID, b.Process, e.Permits, ticket})
	slices.SortFunc(m.queue, func(a, b modelWaiter) int {
		return cmp.Or(cmp.Compare(a.ticket, b.ticket), cmp.Compare(a.id, b.id))
	})
	return semaphore.Answer{Outcome: semaphore.Queued, Ticket: ticket}
}

// anySequence lets three processes send random batches, and compares each report with the model's, and at the end what
// they were told.
func anySequence(t *testing.T, open func(t *testing.T) Place) {
	rapid.Check(t, func(r *rapid.T) {
		f := newFleet(t, open(t))
		g := &sequence{T: r, f: f, ids: map[string]semaphore.Entry{}, owner: map[string]int{},
			model: model{waiting: map[string]*modelProcess{}}}
		for i := range 3 {
			m := f.member(string(rune('a' + i)))
			g.members = append(g.members, m)
			defer m.listen()()
		}
		for range rapid.IntRange(5, 40).Draw(r, "batches") {
			g.step()
		}
		for i, m := range g.members {
			want := g.told[i]
			got := m.hears(len(want))
			byID := func(a, b semaphore.Grant) int { return cmp.Compare(fmt.Sprint(a), fmt.Sprint(b)) }
			slices.SortFunc(got, byID)
			slices.SortFunc(want, byID)
			if !slices.Equal(got, want) {
				r.Fatalf("process %s was told\n%v, want\n%v", m.name, got, want)
			}
		}
	})
}

// sequence is a random test's state.
type sequence struct {
	*rapid.T
	f       *fleet
	model   model
	members []*member
	told    [3][]semaphore.Grant
	ids     map[string]semaphore.Entry // as last sent
	owner   map[string]int
}

// step sends one batch, or lets time pass.
func (g *sequence) step() {
	if rapid.IntRange(0, 4).Draw(g.T, "clock") == 0 {
		g.clock()
	}
	from := rapid.IntRange(0, 2).Draw(g.T, "process")
	m := g.members[from]
	b := &semaphore.Batch{
		Process: m.name, Label: "label", Permits: 3,
		LeaseMicros:    rapid.SampledFrom([]int64{1000, 10e6, 20e6}).Draw(g.T, "lease"),
		PatienceMicros: rapid.SampledFrom([]int64{0, 1000, 5e6, 10e6, 10e6, 10e6}).Draw(g.T, "patience"),
		SetPermits:     rapid.SampledFrom([]int{0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4}).Draw(g.T, "set"),
		Deadline:       rapid.SampledFrom([]int64{0, 0, 0, 0, 0, 1, 1 << 60}).Draw(g.T, "deadline"),
		Leave:          rapid.SliceOfN(g.anyID("leave"), 0, 3).Draw(g.T, "leaves"),
		Renew:          rapid.SliceOfN(g.anyID("renew"), 0, 3).Draw(g.T, "renews"),
	}
	for range rapid.IntRange(0, 4).Draw(g.T, "enters") {
		b.Enter = append(b.Enter, g.entry(from))
	}
	ctx, cancel := context.WithTimeout(background, 30*time.Second)
	defer cancel()
	got, err := m.backend.Apply(ctx, b)
	if err != nil {
		g.Fatal(err)
	}
	if late := b.Deadline == 1; late || got.Late {
		if got.Late != late {
			g.Fatalf("late: %v with the deadline %d at %d", got.Late, b.Deadline, got.Now)
		}
		return
	}
	want, told, err := g.model.apply(b, got.Now)
	if err != nil {
		g.Fatal(err)
	}
	for _, t := range told {
		for i, m := range g.members {
			if m.name == t.process {
				g.told[i] = append(g.told[i], t.grant)
			}
		}
	}
	for i, a := range want.Entered {
		e := b.Enter[i]
		e.Ticket = max(a.Ticket, e.Ticket)
		g.ids[e.ID] = e
	}
	byFence := func(a, b semaphore.Grant) int { return cmp.Or(cmp.Compare(a.Fence, b.Fence), cmp.Compare(a.ID, b.ID)) }
	slices.SortFunc(got.Grants, byFence) // those who waited for nobody to hold come in any order
	slices.SortFunc(want.Grants, byFence)
	if got, want := fmt.Sprintf("%+v", *got), fmt.Sprintf("%+v", *want); got != want {
		g.Fatalf("batch %+v: report\n%s, want\n%s", *b, got, want)
	}
}

// clock lets time pass, or sets it back.
func (g *sequence) clock() {
	if g.f.place.SetBack == nil {
		time.Sleep(rapid.SampledFrom([]time.Duration{2, 10}).Draw(g.T, "sleep") * time.Millisecond)
		return
	}
	d := rapid.SampledFrom([]time.Duration{
		-2 * time.Millisecond, -6 * time.Second, -30 * time.Second, time.Second, 5 * time.Second, time.Hour,
	}).Draw(g.T, "back")
	if g.model.seen != 0 {
		g.f.place.SetBack(g.f.T, d)
		g.model.shift(d.Microseconds())
	}
}

// anyID is one that was sent, or one that never was.
func (g *sequence) anyID(label string) *rapid.Generator[string] {
	known := slices.Sorted(maps.Keys(g.ids))
	return rapid.SampledFrom(append(known, "nobody's"))
}

// entry is a new request, or one of the process' own that was sent before.
func (g *sequence) entry(from int) semaphore.Entry {
	var own []string
	for _, id := range slices.Sorted(maps.Keys(g.ids)) {
		if g.owner[id] == from {
			own = append(own, id)
		}
	}
	wait := rapid.IntRange(0, 3).Draw(g.T, "wait") != 0
	if len(own) > 0 && rapid.IntRange(0, 2).Draw(g.T, "again") == 0 {
		e := g.ids[rapid.SampledFrom(own).Draw(g.T, "id")]
		e.Wait = wait
		if rapid.Bool().Draw(g.T, "forgets its ticket") {
			e.Ticket = 0
		}
		return e
	}
	e := semaphore.Entry{
		ID: fmt.Sprintf("%d-%d", from, len(g.ids)), Permits: rapid.SampledFrom([]int{0, 1, 1, 1, 2, 2, 3, 4}).Draw(g.T, "permits"), Wait: wait,
	}
	g.ids[e.ID], g.owner[e.ID] = e, from
	return e
}

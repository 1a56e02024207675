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

	"github.com/go-tokenbucket/tokenbucket/internal/semaphoremodel"
	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// anySequence sends random batches of three processes. In half of the sequences most batches hold one request of one process. It compares
// each report with the model's, and at the end the grants that each process has received.
func anySequence(t *testing.T, open func(t *testing.T) Fixture) {
	rapid.Check(t, func(r *rapid.T) {
		f := newFleet(t, open(t))
		g := &sequence{T: r, f: f, ids: map[string]store.Entry{}, owner: map[string]int{}, lone: rapid.Bool().Draw(r, "lone")}
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
			got := m.receives(len(want))
			byID := func(a, b store.Grant) int { return cmp.Compare(fmt.Sprint(a), fmt.Sprint(b)) }
			slices.SortFunc(got, byID)
			slices.SortFunc(want, byID)
			if !slices.Equal(got, want) {
				r.Fatalf("process %s was told\n%v, want\n%v", m.name, got, want)
			}
		}
	})
}

// sequence is the state of a random test.
type sequence struct {
	*rapid.T
	f       *fleet
	model   semaphoremodel.Model
	members []*member
	told    [3][]store.Grant
	ids     map[string]store.Entry // as last sent
	owner   map[string]int
	lone    bool
}

// step sends one batch, or lets time pass.
func (g *sequence) step() {
	if rapid.IntRange(0, 4).Draw(g.T, "clock") == 0 {
		g.clock()
	}
	from := rapid.IntRange(0, 2).Draw(g.T, "process")
	lone := g.lone && rapid.IntRange(0, 9).Draw(g.T, "beside others") != 0
	if lone {
		from = rapid.SampledFrom([]int{0, 0, 0, 0, 0, 1}).Draw(g.T, "lone process")
	}
	m := g.members[from]
	b := &store.Batch{
		Process: m.name, Label: "label", Permits: rapid.SampledFrom([]int{3, 3, 2}).Draw(g.T, "permits"),
		LeaseMicros:    rapid.SampledFrom([]int64{1000, 10e6, 20e6}).Draw(g.T, "lease"),
		PatienceMicros: rapid.SampledFrom([]int64{0, 1000, 5e6, 10e6, 10e6, 10e6}).Draw(g.T, "patience"),
		SetPermits:     rapid.SampledFrom([]int{0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 4, -1}).Draw(g.T, "set"),
		AliveMicros:    rapid.SampledFrom([]int64{1000, 10e6, 10e6, 10e6}).Draw(g.T, "alive"),
		Deadline:       rapid.SampledFrom([]int64{0, 0, 0, 0, 0, 1, 1 << 60}).Draw(g.T, "deadline"),
	}
	switch {
	case lone && rapid.Bool().Draw(g.T, "leaves"):
		b.Leave = []string{g.anyID("leave").Draw(g.T, "leave")}
		b.PatienceMicros = rapid.SampledFrom([]int64{0, 0, 0, 10e6}).Draw(g.T, "patience of who leaves")
	case lone:
		b.Enter = []store.Entry{g.entry(from)}
	default:
		b.Leave = rapid.SliceOfN(g.anyID("leave"), 0, 3).Draw(g.T, "leaves")
		b.Renew = rapid.SliceOfN(g.anyID("renew"), 0, 3).Draw(g.T, "renews")
		for range rapid.IntRange(0, 4).Draw(g.T, "enters") {
			b.Enter = append(b.Enter, g.entry(from))
		}
	}
	if lone && rapid.IntRange(0, 4).Draw(g.T, "sets") != 0 {
		b.SetPermits = 0
	} else if b.SetPermits == 0 {
		b.AddPermits = rapid.SampledFrom([]int{0, 0, 0, 0, 0, 0, 1, -1}).Draw(g.T, "add")
	}
	if rapid.IntRange(0, 4).Draw(g.T, "knows a limit") == 0 {
		b.Limit = store.Limit{Permits: rapid.SampledFrom([]int{0, 2, 3}).Draw(g.T, "limit"), Version: rapid.Int64Range(1, 9).Draw(g.T, "version")}
	}
	ctx, cancel := context.WithTimeout(background, 30*time.Second)
	defer cancel()
	got, err := m.store.Apply(ctx, b)
	if err != nil {
		g.Fatal(err)
	}
	if late := b.Deadline == 1; late || got.Late {
		if got.Late != late {
			g.Fatalf("late: %v with the deadline %d at %d", got.Late, b.Deadline, got.Now)
		}
		return
	}
	want, told, err := g.model.Apply(b, got.Now)
	if err != nil {
		g.Fatal(err)
	}
	for _, t := range told {
		for i, m := range g.members {
			if m.name == t.Process {
				g.told[i] = append(g.told[i], t.Grant)
			}
		}
	}
	for i, a := range want.Entered {
		e := b.Enter[i]
		e.Ticket = max(a.Ticket, e.Ticket)
		g.ids[e.ID] = e
	}
	byFence := func(a, b store.Grant) int { return cmp.Or(cmp.Compare(a.Fence, b.Fence), cmp.Compare(a.ID, b.ID)) }
	slices.SortFunc(got.Grants, byFence) // requests that waited until no permit was held come in any order
	slices.SortFunc(want.Grants, byFence)
	if got, want := fmt.Sprintf("%+v", *got), fmt.Sprintf("%+v", *want); got != want {
		holders, err := m.store.Holders(ctx)
		g.Fatalf("batch %+v: report\n%s, want\n%s\nholders %+v (%v), want\n%+v", *b, got, want, holders, err, g.model.Holders(g.model.Seen))
	}
}

// clock lets time pass, or sets the clock back.
func (g *sequence) clock() {
	if g.f.place.SetBack == nil {
		time.Sleep(rapid.SampledFrom([]time.Duration{2, 10}).Draw(g.T, "sleep") * time.Millisecond)
		return
	}
	d := rapid.SampledFrom([]time.Duration{
		-2 * time.Millisecond, -6 * time.Second, -30 * time.Second, time.Second, 5 * time.Second, time.Hour,
	}).Draw(g.T, "back")
	if g.model.Seen != 0 {
		g.f.place.SetBack(g.f.T, d)
		g.model.Shift(d.Microseconds())
	}
}

// anyID returns an id that was sent, or one that never was.
func (g *sequence) anyID(label string) *rapid.Generator[string] {
	known := slices.Sorted(maps.Keys(g.ids))
	return rapid.SampledFrom(append(known, "nobody's"))
}

// entry returns a new request, or one of the process that was sent before.
func (g *sequence) entry(from int) store.Entry {
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
	e := store.Entry{
		ID: fmt.Sprintf("%d-%d", from, len(g.ids)), Permits: rapid.SampledFrom([]int{0, 1, 1, 1, 2, 2, 3, 4}).Draw(g.T, "permits"), Wait: wait,
		Label: rapid.SampledFrom([]string{"", "its own"}).Draw(g.T, "label"),
	}
	g.ids[e.ID], g.owner[e.ID] = e, from
	return e
}

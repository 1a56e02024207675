// Package fair decides whose turn it is among tenants that wait for one bucket.
//
// The obvious order, first come, first served, lets a tenant that asks much make all others wait behind it. Parts of the rate set aside for
// each tenant waste what a quiet tenant does not use. Here the tenants that have waiters take turns, by deficit round robin: a turn gives a
// tenant as many permits as its weight, and it keeps what is too little for its first waiter. So nothing is set aside, and the order is
// decided by those who wait.
package fair

// Turns has the waiters of one queue by tenant. The zero value is empty. It has no lock: the owner's must be held.
//
// Invariants:
//   - A tenant is kept only while it has waiters, so there are no more tenants than waiters.
//   - Within a tenant the order is that of arrival.
//   - The tenant at the front has its turn. Each of the others has one before the tenant at the front has its next.
//   - A turn adds the tenant's weight to its credit, and every permit that the tenant is served subtracts 1. Credit may be negative, after
//     waiters were served out of turn. It is lost when the tenant has no more waiters.
type Turns[V any] struct {
	tenants map[string]*tenant[V]
	front   *tenant[V] // of the ring of tenants; nil if there is none
	largest int64      // the most permits of a waiter since there was none
	most    int        // the most tenants since the map was made
}

// Place is the place of a waiter among those of its tenant. Only its owner sets the exported fields, before Add.
type Place[V any] struct {
	Value   V
	Tenant  string
	Weight  int64 // of the tenant, from now on; at least 1
	Permits int64

	of         *tenant[V] // nil if it is not in a Turns
	prev, next *Place[V]
}

// tenant is a tenant with waiters.
type tenant[V any] struct {
	name       string
	weight     int64
	credit     int64 // permits that its turns gave it and that were not served yet
	backlog    int64 // permits that its waiters need
	waiters    int
	head, last *Place[V]
	prev, next *tenant[V] // in the ring
}

// fewTenants is the size up to which an empty map is kept.
const fewTenants = 64

// Add appends a waiter to those of its tenant. A new tenant has its first turn after all others.
func (t *Turns[V]) Add(p *Place[V]) {
	of := t.tenants[p.Tenant]
	if of == nil {
		of = &tenant[V]{name: p.Tenant}
		if t.tenants == nil {
			t.tenants = make(map[string]*tenant[V])
		}
		t.tenants[p.Tenant] = of
		t.most = max(t.most, len(t.tenants))
	}
	of.weight = max(1, p.Weight)
	if of.prev == nil {
		t.enter(of)
	}
	p.of, p.prev, p.next = of, of.last, nil
	if of.last == nil {
		of.head = p
	} else {
		of.last.next = p
	}
	of.last = p
	of.waiters++
	of.backlog += p.Permits
	t.largest = max(t.largest, p.Permits)
}

// enter adds a tenant to the ring, behind all others.
func (t *Turns[V]) enter(of *tenant[V]) {
	if t.front == nil {
		t.front, of.prev, of.next = of, of, of
		of.credit += of.weight
		return
	}
	of.prev, of.next = t.front.prev, t.front
	of.prev.next, of.next.prev = of, of
}

// Remove removes a waiter that was not served. It does nothing if the waiter is not here.
func (t *Turns[V]) Remove(p *Place[V]) {
	of := p.of
	if of == nil {
		return
	}
	if p.prev == nil {
		of.head = p.next
	} else {
		p.prev.next = p.next
	}
	if p.next == nil {
		of.last = p.prev
	} else {
		p.next.prev = p.prev
	}
	p.of, p.prev, p.next = nil, nil, nil
	of.waiters--
	of.backlog -= p.Permits
	if of.waiters == 0 {
		t.leave(of)
	}
}

// leave removes a tenant without waiters. If it had its turn, the next tenant has it.
func (t *Turns[V]) leave(of *tenant[V]) {
	delete(t.tenants, of.name)
	if of.next == of {
		t.front, t.largest = nil, 0
		if t.most > fewTenants {
			t.tenants, t.most = nil, 0
		}
		return
	}
	of.prev.next, of.next.prev = of.next, of.prev
	if t.front == of {
		t.turn(of.next)
	}
}

// turn begins the turn of a tenant.
func (t *Turns[V]) turn(of *tenant[V]) {
	t.front = of
	of.credit += of.weight
}

// Served removes a waiter that was served, whether or not it was its turn.
func (t *Turns[V]) Served(p *Place[V]) {
	if p.of != nil {
		p.of.credit -= p.Permits
		t.Remove(p)
	}
}

// Next returns the waiter whose turn it is, or nil if there are no waiters. It returns the same one until that leaves.
//
// It ends the turn of a tenant whose credit is too little for its first waiter. If all waiters need one permit, it looks at one or two
// tenants. Rounds in which no credit would suffice are skipped at once, so it looks at each tenant four times at most.
func (t *Turns[V]) Next() *Place[V] {
	if t.front == nil {
		return nil
	}
	for looked := 0; t.front.credit < t.front.head.Permits; looked++ {
		if looked == len(t.tenants) {
			t.skip()
		}
		t.turn(t.front.next)
	}
	return t.front.head
}

// skip gives all tenants the credit of the rounds in which none of them could be served.
func (t *Turns[V]) skip() {
	least := int64(1) << 62
	for of, some := t.front, true; some; some = of != t.front {
		missing := of.head.Permits - of.credit
		least = min(least, (missing+of.weight-1)/of.weight)
		of = of.next
	}
	for of, some := t.front, true; some; some = of != t.front {
		of.credit += (least - 1) * of.weight
		of = of.next
	}
}

// First returns the first waiter of the tenant of p, or nil if p is not here.
func (t *Turns[V]) First(p *Place[V]) *Place[V] {
	if p.of == nil {
		return nil
	}
	return p.of.head
}

// Tenants returns how many tenants have waiters.
func (t *Turns[V]) Tenants() int { return len(t.tenants) }

// Waiters returns how many waiters a tenant has.
func (t *Turns[V]) Waiters(tenant string) int {
	if of := t.tenants[tenant]; of != nil {
		return of.waiters
	}
	return 0
}

// All calls f with the first waiter of each tenant.
func (t *Turns[V]) All(f func(first *Place[V])) {
	for _, of := range t.tenants {
		f(of.head)
	}
}

// examined bounds how many tenants Ahead examines.
const examined = 64

// Ahead returns at least how many permits are served before a newcomer, unless waiters leave, its own not included. It examines a bounded
// number of tenants, and counts nothing for the others.
func (t *Turns[V]) Ahead(newcomer *Place[V]) (permits int64) {
	weight, credit, own := max(1, newcomer.Weight), int64(0), newcomer.Permits
	of := t.tenants[newcomer.Tenant]
	if of != nil {
		credit, own = of.credit, of.backlog+newcomer.Permits
	}
	turns := (max(0, own-credit) + weight - 1) / weight // until its credit suffices
	permits = own - newcomer.Permits
	if turns <= 1 || t.front == nil {
		return permits
	}
	for other, n := t.front, 0; n < min(examined, len(t.tenants)); other, n = other.next, n+1 {
		if other != of { // it has at least so many turns, and keeps what is too little for a waiter
			permits += min(other.backlog, max(0, (turns-1)*other.weight+other.credit-(t.largest-1)))
		}
	}
	return permits
}

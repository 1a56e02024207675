package registry

// past is the versions of limits that are gone, for the case that they come back with an older one: in two generations, of which the
// older is forgotten when the newer is full. A limit that was forgotten and comes back is settled by dispute, two loads later, or
// finds that its bucket has expired.
type past struct {
	new, old map[string]int64
}

// maxPast is how many limits that are gone are remembered at least.
const maxPast = 10_000

func (p *past) put(name string, version int64) {
	delete(p.old, name)
	if p.new == nil || len(p.new) >= maxPast {
		p.new, p.old = map[string]int64{}, p.new
	}
	p.new[name] = version
}

func (p *past) get(name string) (version int64, ok bool) {
	if version, ok = p.new[name]; !ok {
		version, ok = p.old[name]
	}
	return version, ok
}

package registry

// past has the versions of removed limits, because a row may return with an older version. It has two generations: the older is dropped when
// the newer is full. If a limit returns after that, dispute gives it a higher version two loads later, unless its bucket has expired.
type past struct {
	new, old map[string]int64
}

// maxPast is the number of removed limits that are kept at least.
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

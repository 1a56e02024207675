package registry

// book is what is in force, replaced as a whole: who reads it sees one load.
type book struct {
	rows map[string]*entry // by name
	wide wide              // those that hold for more names than their own
}

// entryOf returns what decides about a name: the row of that name, or of those that hold for it the one that says most of it; nil
// if there is none. If the row is for each key, it is the entry of the key.
func (r *Registry) entryOf(name string) *entry {
	b := r.limits.Load()
	e := b.rows[name]
	if e == nil {
		if e = b.wide.find(name); e == nil {
			return nil
		}
	}
	return r.ofKey(e, name)
}

// Match returns the name of the row that decides about the calls of a name, good or bad. exact: it names all of it, or all of its
// first parts ([WithParts]), without a * at its end. A bucket that a row has for one key has the row's name here.
func (r *Registry) Match(name string) (row string, exact, ok bool) {
	b := r.limits.Load()
	if b == nil {
		return "", false, false
	}
	e := b.rows[name]
	if e == nil {
		e = b.wide.find(name)
	}
	if e == nil {
		return "", false, false
	}
	return e.limit.Name, !isPattern(e.limit.Name), true
}

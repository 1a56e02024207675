package registry

// book is the table in force. Each load replaces it as a whole, so a reader sees the rows of one load.
type book struct {
	rows map[string]*entry // by name
	wide wide              // the rows that match more names than their own
}

// entryOf returns the entry that decides about a name: of the row with that name, or of the longest row that matches it; nil if there is
// none. If the row has a bucket for each key, it is the entry of the key.
func (r *Registry) entryOf(b *book, name string) *entry {
	e := b.rows[name]
	if e == nil {
		if e = b.wide.find(name); e == nil {
			return nil
		}
	}
	return r.ofKey(e, name)
}

// Match returns the name of the row that decides about the calls of a name, also if the row is bad. exact reports whether the row has the
// whole name, or all of its first parts ([WithParts]), rather than a * at its end. For the bucket of a key it returns the name of the row.
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
	return e.row(), !isPattern(e.row()), true
}

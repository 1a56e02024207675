package rows

const (
	// made is the number of versions of buckets for each version that a table can give: that version itself, and those that processes make up above it.
	made = 1 << 10
	// counted bounds the versions that count changes, so that those of semaphores are at most 2^52. Higher ones are times in microseconds since 1970: this
	// is in February 1970.
	counted = 1 << 42
	// mostExact is the highest version of a bucket.
	mostExact = 1 << 53
)

// Version returns the version of buckets for one that a table gives. Its last ten bits are zero, so that versions that processes make up are apart
// from it. A time is rounded down to 1.024 ms, and a number of changes is multiplied. Two times within 1.024 ms count as one.
func Version(v int64) int64 {
	if v < counted {
		return v * made
	}
	return v &^ (made - 1)
}

// given returns the version that a table gave, on which a process has made up that of a bucket.
func given(bucket int64) int64 { return bucket &^ (made - 1) }

// above returns the version of the rule's content in its bucket, after another content with the version before. It is the table's if that is higher.
func (r *Rule[C]) above(before int64) int64 {
	own := Version(r.Version)
	if own > before {
		return own
	}
	if next := before + 1; r.mayMake(next) {
		return next
	}
	return before // of two contents with one version the same one is in force in every process
}

// mayMake reports whether a process may make up a version: it is above the newest one that the table has given, and below the next. Versions of rows
// without a time are above anything that is there, since nothing tells which is newer.
func (r *Rule[C]) mayMake(version int64) bool {
	return version <= mostExact && (r.Version == 0 || given(version) <= r.newest)
}

// mayPut reports whether the rule's content may be put in force in place of another one with that version: by hand, or by the content hash of two
// that were given with one time. It may not if a table has given the version, nor if the content is of an earlier time than the newest.
func (r *Rule[C]) mayPut(there int64) bool {
	return r.mayMake(there+1) && (r.Version == 0 || Version(r.Version) == r.newest)
}

// past has the versions of ended rules, because a row may return with an older version. It has two generations: the older is dropped when the
// newer is full.
type past struct {
	new, old map[string]ended
}

// ended has the versions of a rule that has ended.
type ended struct{ bucket, newest int64 }

// maxPast is the number of ended rules that are kept at least.
const maxPast = 10_000

func (p *past) put(name string, e ended) {
	delete(p.old, name)
	if p.new == nil || len(p.new) >= maxPast {
		p.new, p.old = map[string]ended{}, p.new
	}
	p.new[name] = e
}

func (p *past) get(name string) (e ended, ok bool) {
	if e, ok = p.new[name]; !ok {
		e, ok = p.old[name]
	}
	return e, ok
}

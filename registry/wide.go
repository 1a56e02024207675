package registry

import (
	"slices"
	"sort"
	"strings"
)

// separator separates the parts of a name (WithParts). Within a part it is escaped by a \.
const separator = '|'

// isPattern reports whether a row matches all names with its prefix.
func isPattern(name string) bool { return strings.HasSuffix(name, "*") }

// wide has the rows that match more names than their own, sorted by their prefix. Each prefix has a link to the longest other prefix that
// begins it, so a name costs one binary search and a few steps, however many rows there are.
type wide struct {
	begins []beginning
}

// beginning is a row and the prefix of the names that it matches.
type beginning struct {
	text string
	row  *entry
	up   int // index of the longest other prefix that begins this one; -1 if there is none
}

// newWide returns the rows that match more names than their own. With parts, a row matches all names whose first parts are its own.
func newWide(rows map[string]*entry, parts bool) wide {
	var w wide
	for name, e := range rows {
		switch text, star := strings.CutSuffix(name, "*"); {
		case strings.Contains(text, "*"): // not a valid name
		case star:
			w.begins = append(w.begins, beginning{text, e, -1})
		case parts:
			w.begins = append(w.begins, beginning{name + string(separator), e, -1})
		}
	}
	slices.SortFunc(w.begins, func(a, b beginning) int {
		if a.text != b.text {
			return strings.Compare(a.text, b.text)
		}
		return strings.Compare(b.row.row(), a.row.row()) // the prefix /a| of /a comes after that of /a|*, so find returns /a
	})
	for i := 1; i < len(w.begins); i++ {
		up := i - 1
		for up >= 0 && !strings.HasPrefix(w.begins[i].text, w.begins[up].text) {
			up = w.begins[up].up
		}
		w.begins[i].up = up
	}
	return w
}

// find returns the row with the longest prefix of the name; nil if there is none.
func (w *wide) find(name string) *entry {
	if len(w.begins) == 0 {
		return nil
	}
	name = name[:min(len(name), maxName+1)] // no prefix is longer, but a path may have a megabyte
	i := sort.Search(len(w.begins), func(i int) bool { return w.begins[i].text > name }) - 1
	if i < 0 {
		return nil
	}
	same := samePrefix(w.begins[i].text, name)
	for ; i >= 0; i = w.begins[i].up {
		if len(w.begins[i].text) <= same {
			return w.begins[i].row
		}
	}
	return nil
}

// samePrefix returns the length of the common prefix.
func samePrefix(a, b string) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

package registry

import (
	"slices"
	"sort"
	"strings"
)

// separator is between the parts of a name (WithParts); one that belongs to a part has a \ before it.
const separator = '|'

// isPattern tells whether a row holds for all names that begin as its own does.
func isPattern(name string) bool { return strings.HasSuffix(name, "*") }

// wide are the rows that hold for more names than their own: of those that begin as a text, sorted. What is before a text in this
// order and begins it is found by going up, so a name costs one search and a few steps, however many rows there are.
type wide struct {
	begins []beginning
}

type beginning struct {
	text string
	row  *entry
	up   int // the longest of the others that begins this one; -1: none
}

// newWide finds those rows. parts: a row holds for all names whose first parts are its own.
func newWide(rows map[string]*entry, parts bool) wide {
	var w wide
	for name, e := range rows {
		switch text, star := strings.CutSuffix(name, "*"); {
		case strings.Contains(text, "*"): // no good row's name
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
		return strings.Compare(b.row.limit.Name, a.row.limit.Name) // /a| of /a comes after that of /a|*, and is found
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

// find returns the row with the longest text that begins the name; nil if there is none.
func (w *wide) find(name string) *entry {
	if len(w.begins) == 0 {
		return nil
	}
	name = name[:min(len(name), maxName+1)] // no text is longer, and a path may have a megabyte
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

// samePrefix is how many bytes at the beginning are the same.
func samePrefix(a, b string) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

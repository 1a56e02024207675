package semaphore

import (
	"strconv"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/semaphore/store"
)

// replyReader reads the strings of a reply one after the other. bad is set after a string that does not parse.
type replyReader struct {
	rest []string
	bad  bool
}

func (r *replyReader) text() (text string) {
	if len(r.rest) == 0 {
		r.bad = true
		return ""
	}
	text, r.rest = r.rest[0], r.rest[1:]
	return text
}

// number reads a string with one integer.
func (r *replyReader) number() int64 {
	n, err := strconv.ParseInt(r.text(), 10, 64)
	r.bad = r.bad || err != nil
	return n
}

// numbers reads a string with several integers.
func (r *replyReader) numbers(into ...*int64) { r.numbersOf(r.text(), into...) }

func (r *replyReader) numbersOf(text string, into ...*int64) {
	fields := strings.Fields(text)
	if len(fields) != len(into) {
		r.bad = true
		return
	}
	for i, f := range fields {
		n, err := strconv.ParseInt(f, 10, 64)
		if err != nil {
			r.bad = true
			return
		}
		*into[i] = n
	}
}

// parse decodes a reply of lua/apply.lua. quiet reports whether the state is in one field now.
func parse(b *store.Batch, reply []string) (_ *store.Report, quiet, unfinished, ok bool) {
	r := &replyReader{rest: reply}
	var out store.Report
	first := r.text()
	if late, ok := strings.CutPrefix(first, "late "); ok {
		out.Late = true
		r.numbersOf(late, &out.Now)
		return &out, false, false, !r.bad
	}
	var fresh, permits, limit, unchanged, packed, rest int64
	r.numbersOf(first, &out.Now, &fresh, &permits, &out.Earliest, &out.Notified, &limit, &out.Limit.Version, &unchanged, &packed, &rest)
	out.Fresh, out.Permits, out.Limit.Permits, out.Unchanged = fresh == 1, int(permits), int(limit), unchanged == 1
	for range b.Leave {
		var standing int64
		r.numbers(&standing)
		out.Left = append(out.Left, store.Standing(standing))
	}
	for range b.Renew {
		out.Renewed = append(out.Renewed, r.text() == "1")
	}
	enter := b.Enter
	if rest == 1 {
		enter = nil
	}
	for range enter {
		var outcome int64
		var a store.Result
		r.numbers(&outcome, &a.Fence, &a.Ticket)
		a.Outcome = store.Outcome(outcome)
		out.Entered = append(out.Entered, a)
	}
	for _, text := range r.rest {
		g, ok := parseGrant(text)
		r.bad = r.bad || !ok
		out.Grants = append(out.Grants, g)
	}
	return &out, packed == 1, rest == 1, !r.bad
}

// parseGrant decodes 'id outcome fence expires'.
func parseGrant(text string) (g store.Grant, ok bool) {
	fields := strings.Fields(text)
	if len(fields) != 4 {
		return g, false
	}
	outcome, err1 := strconv.ParseUint(fields[1], 10, 8)
	fence, err2 := strconv.ParseInt(fields[2], 10, 64)
	expires, err3 := strconv.ParseInt(fields[3], 10, 64)
	g = store.Grant{ID: fields[0], Outcome: store.Outcome(outcome), Fence: fence, Expires: expires}
	return g, err1 == nil && err2 == nil && err3 == nil
}

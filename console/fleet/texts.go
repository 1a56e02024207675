package fleet

import (
	"encoding/json"
	"strconv"
	"strings"
	"unicode/utf8"
)

// texts are fields of a hash: the values that Redis has, and those that it should have.
type texts struct {
	all   map[string]*text
	round uint64
	count int    // of this round
	open  []pair // to be written after the round
}

type text struct {
	written string
	stored  bool // whether Redis has published
	now     string
	round   uint64
}

// pair is a field and its value; an empty value removes the field.
type pair struct{ name, text string }

func newTexts() texts { return texts{all: map[string]*text{}} }

func (t *texts) begin() { t.round, t.count, t.open = t.round+1, 0, t.open[:0] }

// set sets the value of a field.
func (t *texts) set(name, now string) {
	f := t.all[name]
	if f == nil {
		f = &text{}
		t.all[name] = f
	}
	f.now, f.round = now, t.round
	t.count++
	if !f.stored || f.written != now {
		t.open = append(t.open, pair{name, now})
	}
}

// json sets a field to the encoding of a value. An empty list is no field.
func (t *texts) json(name string, value any) {
	if b, err := json.Marshal(value); err == nil && string(b) != "null" && string(b) != "[]" {
		t.set(name, string(b))
	}
}

// keep leaves a field as it is.
func (t *texts) keep(name string) {
	if f := t.all[name]; f != nil && f.now != "" {
		t.set(name, f.now)
	}
}

// end removes the fields not set since begin, and reports whether anything is to be written.
func (t *texts) end() bool {
	for name, f := range t.all {
		if f.round != t.round {
			f.now = ""
			t.open = append(t.open, pair{name, ""})
		}
	}
	return len(t.open) > 0
}

// drop forgets a field that is written elsewhere.
func (t *texts) drop(name string) { delete(t.all, name) }

func (t *texts) forget() {
	for _, f := range t.all {
		f.stored = false
	}
}

func (t *texts) done(written []pair) {
	for _, p := range written {
		f := t.all[p.name]
		switch {
		case f == nil:
		case p.text == "":
			delete(t.all, p.name)
		default:
			f.written, f.stored = p.text, true
		}
	}
}

func (t *texts) doubt(written []pair) {
	for _, p := range written {
		if f := t.all[p.name]; f != nil {
			f.stored = false
		}
	}
}

// split splits a list after most elements.
func split[T any](list []T, most int) (head, tail []T) {
	n := min(most, len(list))
	return list[:n:n], list[n:]
}

func cut[T any](list []T, most int) []T { return list[:min(most, len(list))] }

// shortened returns s, cut to most bytes of valid UTF-8. A cut text ends at a word, with an ellipsis.
func shortened(s string, most int) string {
	if s = strings.ToValidUTF8(s[:min(len(s), most+1)], "\uFFFD"); len(s) <= most {
		return s
	}
	const ellipsis = "…"
	end := most - len(ellipsis)
	for !utf8.RuneStart(s[end]) {
		end--
	}
	if blank := strings.LastIndexByte(s[:end], ' '); blank > end/2 {
		end = blank
	}
	return s[:end] + ellipsis
}

func number(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }

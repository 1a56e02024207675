package registry

import (
	"net/http"
	"strings"
)

// Penalty selects the replies of an upstream, with Retry-After, that hold a row's bucket back. The zero value leaves the choice to the gate.
type Penalty uint8

// The penalties of a row.
const (
	PenaltyDefault Penalty = iota
	PenaltyNone
	Penalty503
	Penalty429
	PenaltyBoth
)

var penalties = [...]string{PenaltyDefault: "", PenaltyNone: "none", Penalty503: "503", Penalty429: "429", PenaltyBoth: "429,503"}

// String returns the value of the column; it is empty for the default.
func (p Penalty) String() string {
	if int(p) < len(penalties) {
		return penalties[p]
	}
	return "invalid"
}

// ParsePenalty returns the penalty of a text: none, 503, 429 or 429,503. ok is false for other texts.
func ParsePenalty(text string) (p Penalty, ok bool) {
	for p, name := range penalties {
		if name != "" && name == text {
			return Penalty(p), true
		}
	}
	return PenaltyDefault, false
}

// Covers reports whether a reply with that status holds the bucket back. For PenaltyDefault it returns byDefault.
func (p Penalty) Covers(status int, byDefault bool) bool {
	switch p {
	case PenaltyDefault:
		return byDefault
	case PenaltyBoth:
		return status == http.StatusTooManyRequests || status == http.StatusServiceUnavailable
	case Penalty429:
		return status == http.StatusTooManyRequests
	case Penalty503:
		return status == http.StatusServiceUnavailable
	}
	return false
}

// Penalty returns the penalty of the row that decides about a name. own reports whether the name has its bucket alone, rather than with
// other names that the row matches.
func (r *Registry) Penalty(name string) (p Penalty, own bool) {
	e := r.entryOf(r.limits.Load(), name)
	switch {
	case e == nil:
		return PenaltyDefault, !r.callers.shares("", name)
	case e.of != nil:
		return e.limit.Penalty, !strings.HasSuffix(e.limit.Name, othersMark)
	}
	row := Limit{Name: e.row()}
	_, open := row.rest(name, r.parts)
	return e.limit.Penalty, !open
}

// Penalizes reports whether an upstream's reply with that status and Retry-After holds the name's bucket back (Limit.Penalty). By default
// every status does. httplimit.Transport calls it.
func (r *Registry) Penalizes(name string, status int) bool {
	p, _ := r.Penalty(name)
	return p.Covers(status, true)
}

package registry

import "github.com/go-tokenbucket/tokenbucket/gate"

// Decider returns the limit that decides about the calls of a name now. If no bucket decides, pass reports whether the calls pass.
func (r *Registry) Decider(name string) (by gate.Decider, pass bool) {
	f, err := r.find(name)
	if f.limiter != nil { // of a row, or of a Default
		return gate.ByLimit, false
	}
	return f.by, f.pass && err == nil
}

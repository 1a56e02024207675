package registry

import "github.com/go-tokenbucket/tokenbucket/gate"

// Decider returns what decides about the calls of a name now. For a name without a bucket, pass reports whether its calls pass.
func (r *Registry) Decider(name string) (by gate.Decider, pass bool) {
	f, err := r.find(name)
	if f.limiter != nil { // also that of a Default
		return gate.ByLimit, false
	}
	return f.by, f.pass && err == nil
}

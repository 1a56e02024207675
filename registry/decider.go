package registry

// Decider tells what decides about the calls of a name.
type Decider uint8

const (
	// ByLimit: the bucket of its row, or of a Default; of a row that names more, its rate.
	ByLimit Decider = iota
	// BySwitch: the switch is off, and every call passes.
	BySwitch
	// ByDisabled: the row is disabled, and every call passes.
	ByDisabled
	// ByZero: the row's rate is 0, and every call is refused.
	ByZero
	// ByBadRow: the row never was good, and WithBadRows says Pass or Refuse.
	ByBadRow
	// ByUnknown: there is no row, and WithUnknown says Pass or Refuse.
	ByUnknown
	// ByShadow: a rate of 0, a bad row or an unknown name would refuse the calls, but they are in shadow (WithShadow, Limit.Shadow), and
	// pass.
	ByShadow
	// ByWindow: the row's window.
	ByWindow
	// ByConcurrency: as many calls are under way as the row allows.
	ByConcurrency
	// ByPenalty: an upstream has asked to be left alone, and the row has no rate (Registry.Penalize).
	ByPenalty
)

var deciders = [...]string{"limit", "switch", "disabled", "zero", "bad_row", "unknown", "shadow", "window", "concurrency", "penalty"}

// String is one word: limit, switch, disabled, zero, bad_row, unknown, shadow, window, concurrency, penalty.
func (d Decider) String() string {
	if int(d) < len(deciders) {
		return deciders[d]
	}
	return "none"
}

// Decider returns what decides about the calls of a name now, and for one that has no bucket, whether they pass.
func (r *Registry) Decider(name string) (by Decider, pass bool) {
	f, err := r.find(name)
	if f.limiter != nil { // also that of a Default
		return ByLimit, false
	}
	return f.by, f.pass && err == nil
}

package gate

// Decider is the reason for a decision: a limit of the call's row, or the reason why none was evaluated.
type Decider uint8

const (
	// ByLimit: the bucket of the row, or of a default limit. In a row with further limits, it stands for the rate.
	ByLimit Decider = iota
	// BySwitch: the global switch is off, and every call passes.
	BySwitch
	// ByDisabled: the row is disabled, and every call passes.
	ByDisabled
	// ByZero: the row's rate is 0, and every call is refused.
	ByZero
	// ByBadRow: the row was never valid, and the registry's policy for bad rows decides (registry.WithBadRows).
	ByBadRow
	// ByUnknown: the name has no row, and the registry's policy for unknown names decides (registry.WithUnknown).
	ByUnknown
	// ByShadow: the call would be refused, but its limit is in shadow, so it passes (registry.WithShadow, registry.Limit.Shadow).
	ByShadow
	// ByWindow: the row's window.
	ByWindow
	// ByConcurrency: the row's concurrency.
	ByConcurrency
	// ByPenalty: a penalty of a row without a rate (registry.Registry.Penalize).
	ByPenalty
)

var deciders = [...]string{"limit", "switch", "disabled", "zero", "bad_row", "unknown", "shadow", "window", "concurrency", "penalty"}

// String returns one word: limit, switch, disabled, zero, bad_row, unknown, shadow, window, concurrency or penalty.
func (d Decider) String() string {
	if int(d) < len(deciders) {
		return deciders[d]
	}
	return "none"
}

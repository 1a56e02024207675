package permit

// End is what the caller of a granted reservation has done with its permits. A reservation ends once: each of its permits counts as settled, or goes
// back, or is used as granted. The lock that guards the reservation's due time guards its end, too, since permits that are due cannot be cancelled.
type End uint8

// The ends.
const (
	Open      End = iota // used as granted once they are due, unless the reservation ends otherwise
	Settled              // replaced by what the call has used
	GivenBack            // by Cancel or Return
)

// String returns open, settled or given back.
func (e End) String() string { return [...]string{"open", "settled", "given back"}[e] }

// Claim ends a reservation. It reports false if the reservation has ended before.
func (e *End) Claim(as End) bool {
	if *e != Open {
		return false
	}
	*e = as
	return true
}

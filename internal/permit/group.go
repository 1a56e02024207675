package permit

// Choice says from which members of a [Group] a joint request takes permits.
type Choice uint8

// The choices.
const (
	All Choice = iota // from every member, or from none
	Any               // from the member whose permits are due first, the first of the list if several are
)

// String returns all or any.
func (c Choice) String() string {
	if c == Any {
		return "any"
	}
	return "all"
}

// Group is the batches of one process to several buckets, decided in one atomic step. The last Joint requests of each batch are joint: the i-th
// of one batch belongs with the i-th of every other. They are all Take. The requests before them are decided bucket by bucket.
type Group struct {
	// Members are the batches, of different buckets. They have the same number of joint requests.
	Members []*Batch
	Joint   int
	Choice  Choice
}

// Fault is the error of a group that concerns the bucket of one member alone: its state is corrupt, or of another kind.
type Fault struct {
	Member int // in Members
	Err    error
}

func (f *Fault) Error() string { return f.Err.Error() }

// Unwrap returns Err.
func (f *Fault) Unwrap() error { return f.Err }

// Request returns the i-th joint request of a member.
func (g *Group) Request(member, i int) *Request {
	requests := g.Members[member].Requests
	return &requests[len(requests)-g.Joint+i]
}

// Granted reports whether the i-th joint request took permits.
func (g *Group) Granted(i int) bool {
	for m := range g.Members {
		if g.Request(m, i).Grant.OK {
			return true
		}
	}
	return false
}

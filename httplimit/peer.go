package httplimit

// peerState is what the system knows of the other end of a connection.
type peerState int

const (
	peerOpen     peerState = iota
	peerFinished           // it has closed its direction, and maybe both
	peerGone               // it has reset the connection
)

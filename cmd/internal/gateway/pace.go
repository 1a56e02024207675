package gateway

import "time"

// pace bounds how long a call may wait for its client to send or to read bytes. One wait lasts at most patience, and ends when the client is
// more than patience behind the minimum rate. A fast client gets ahead of the rate by at most patience; otherwise it could be fast first and
// then keep its place for hours. Waits for the upstream do not count, so streams may pause. pace needs a lock of its owner, and reads no clock.
type pace struct {
	patience time.Duration // no limit if 0
	rate     int           // minimum rate in bytes per second; none if 0
	ahead    time.Duration // how far the client is ahead of the minimum rate; negative if it is behind
}

// left returns how long the next n bytes may take. It returns false if there is no limit.
func (p *pace) left(n int) (time.Duration, bool) {
	switch {
	case p.patience == 0:
		return 0, false
	case p.rate == 0:
		return p.patience, true
	}
	return p.patience + p.time(n) + min(0, p.ahead), true
}

// time returns how long n bytes take at the minimum rate, or 0 without one.
func (p *pace) time(n int) time.Duration {
	const longest = 1 << 33 // bytes; the product below does not overflow
	if p.rate == 0 {
		return 0
	}
	return time.Duration(min(int64(n), longest)) * time.Second / time.Duration(p.rate)
}

// note records that the client took d to send or read n bytes.
func (p *pace) note(n int, d time.Duration) {
	p.ahead = min(p.ahead+p.time(n)-d, p.patience)
}

package console

import (
	"context"
	"errors"
	"sync"
	"time"
)

// feed is one reader for all who look at the same: it asks once in a beat while anybody looks, and for linger afterwards, and gives
// each viewer the same bytes.
type feed struct {
	beat, linger time.Duration
	// read returns what to send to those who look already (nothing: nil), and what makes what somebody who comes now, or has missed
	// something, must be sent instead; nil: that cannot be had now, so they still miss it. The context has a deadline.
	read func(ctx context.Context) (change []byte, whole func() []byte)

	mu      sync.Mutex
	viewers map[*viewer]struct{}
	whole   func() []byte      // of the last beat; nil before the first
	stop    context.CancelFunc // nil: nobody reads
	done    chan struct{}
	idle    time.Time // since when nobody looks
	ended   func()    // told when the reading ends
	closed  bool      // nobody reads any more
}

// viewer is somebody who looks. It has place for a few frames; to whom they are too many is sent the whole instead, later.
type viewer struct {
	frames chan []byte
	missed bool // under the feed's lock
}

const (
	pending     = 4
	readTimeout = 5 * time.Second
)

// errFull: as many look as may.
var errFull = errors.New("console: too many streams")

func (f *feed) join() *viewer {
	v := &viewer{frames: make(chan []byte, pending)}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.viewers == nil {
		f.viewers = map[*viewer]struct{}{}
	}
	f.viewers[v] = struct{}{}
	if f.whole != nil && f.stop != nil {
		v.frames <- f.whole()
	} else {
		v.missed = true
	}
	if f.stop == nil && !f.closed {
		ctx, stop := context.WithCancel(context.Background())
		f.stop, f.done = stop, make(chan struct{})
		go f.run(ctx, f.done)
	}
	return v
}

func (f *feed) leave(v *viewer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.viewers, v)
	f.idle = time.Now()
}

// run reads until nobody has looked for a while, or ctx ends.
func (f *feed) run(ctx context.Context, done chan struct{}) {
	defer close(done)
	ticker := time.NewTicker(f.beat)
	defer ticker.Stop()
	for {
		reading, cancel := context.WithTimeout(ctx, readTimeout)
		change, whole := f.read(reading)
		cancel()
		if !f.hand(change, whole) {
			return
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// hand gives all viewers what they need. It is false when nobody has looked for a while: then the reading ends.
func (f *feed) hand(change []byte, whole func() []byte) bool {
	f.mu.Lock()
	if len(f.viewers) == 0 && time.Since(f.idle) >= f.linger {
		f.stop()
		f.stop, f.whole = nil, nil
		f.mu.Unlock()
		f.ended()
		return false
	}
	f.whole = whole
	for v := range f.viewers {
		frame := change
		lacks := v.missed && whole == nil
		if v.missed && !lacks {
			frame = whole()
		}
		if frame == nil {
			continue
		}
		select {
		case v.frames <- frame:
			v.missed = lacks
		default:
			v.missed = true
		}
	}
	f.mu.Unlock()
	return true
}

// close ends the reading.
func (f *feed) close() {
	f.mu.Lock()
	stop, done := f.stop, f.done
	f.closed = true
	f.mu.Unlock()
	if stop != nil {
		stop()
		<-done
	}
}

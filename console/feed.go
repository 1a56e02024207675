package console

import (
	"context"
	"errors"
	"sync"
	"time"
)

// feed has one reader for all viewers of the same data. It reads once per beat while there are viewers, and for linger
// afterwards, and sends every viewer the same bytes.
type feed struct {
	beat, linger time.Duration
	// read returns the change for current viewers (nil if there is none), and a function for the full frame, which new
	// viewers and those that missed a frame need. The function is nil if there is no full frame now; such viewers then wait
	// for the next beat. The context has a deadline.
	read func(ctx context.Context) (change []byte, whole func() []byte)

	mu      sync.Mutex
	viewers map[*viewer]struct{}
	whole   func() []byte      // of the last beat; nil before the first
	stop    context.CancelFunc // ends the reader; nil if none runs
	done    chan struct{}
	idle    time.Time // when the last viewer left
	ended   func()    // called when the reader ends
	closed  bool      // no reader starts any more
}

// viewer is one stream. It buffers a few frames; if the buffer is full, it is sent the full frame later.
type viewer struct {
	frames chan []byte
	missed bool // it needs a full frame; guarded by feed.mu
}

const (
	pending     = 4
	readTimeout = 5 * time.Second
)

// errFull is returned if MaxStreams streams are open.
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

// run reads once per beat until there have been no viewers for a while, or ctx ends.
func (f *feed) run(ctx context.Context, done chan struct{}) {
	defer close(done)
	ticker := time.NewTicker(f.beat)
	defer ticker.Stop()
	for {
		reading, cancel := context.WithTimeout(ctx, readTimeout)
		change, whole := f.read(reading)
		cancel()
		if !f.broadcast(change, whole) {
			return
		}
		select {
		case <-ticker.C:
		case <-ctx.Done():
			return
		}
	}
}

// broadcast sends each viewer the frame that it needs. It returns false, and ends the reader, if there have been no viewers
// for a while.
func (f *feed) broadcast(change []byte, whole func() []byte) bool {
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

// close ends the reader.
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

package console

import (
	"context"
	"net/http"
	"strconv"
	"time"
)

const (
	// writeTimeout bounds one write to a viewer. A viewer whose buffers stay full for longer is dropped.
	writeTimeout = 5 * time.Second
	// silence is the interval of comments on an idle stream, so that a closed connection is noticed.
	silence = 15 * time.Second
)

// stream sends a feed to a viewer as server-sent events, until either ends or StreamTime is over. The browser then
// reconnects. The feed is created only once there is room for the stream, because a feed without viewers would never end.
func (c *Console) stream(w http.ResponseWriter, r *http.Request, of func() *feed) {
	if !c.enter() {
		w.Header().Set("Retry-After", "10")
		http.Error(w, errFull.Error(), http.StatusServiceUnavailable)
		return
	}
	defer c.streams.Add(-1)
	out := http.NewResponseController(w)
	send := func(text []byte) bool {
		if out.SetWriteDeadline(time.Now().Add(writeTimeout)) != nil {
			return false // a stuck viewer could not be dropped
		}
		_, err := w.Write(text)
		return err == nil && out.Flush() == nil
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // or nginx would buffer the stream
	w.WriteHeader(http.StatusOK)
	ctx, cancel := context.WithTimeout(r.Context(), c.config.StreamTime)
	defer cancel()
	f := of()
	v := f.join()
	defer f.leave(v)
	if !send([]byte("retry: " + strconv.Itoa(int(c.config.Beat.Milliseconds())) + "\n\n")) {
		return
	}
	quiet := time.NewTicker(silence)
	defer quiet.Stop()
	for {
		text := []byte(":\n\n")
		select {
		case frame := <-v.frames:
			text = frame
			quiet.Reset(silence)
		case <-quiet.C:
		case <-ctx.Done():
			return
		case <-c.closed:
			return
		}
		if !send(text) {
			return
		}
	}
}

// enter counts a stream, and reports whether there is room for it.
func (c *Console) enter() bool {
	if c.streams.Add(1) <= int64(c.config.MaxStreams) {
		return true
	}
	c.streams.Add(-1)
	return false
}

// event encodes a server-sent event. data must be JSON without a line break.
func event(name string, data []byte) []byte {
	out := make([]byte, 0, len(data)+len(name)+16)
	out = append(out, "event: "...)
	out = append(out, name...)
	out = append(out, "\ndata: "...)
	out = append(out, data...)
	return append(out, "\n\n"...)
}

// Package triestest has upstreams that make net/http send requests again.
package triestest

import (
	"bufio"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Mortal is an upstream over HTTP/1.1. The first request of each connection gets a response. Once it is dying, the connection of every other
// request is closed instead.
type Mortal struct {
	net.Listener
	Received atomic.Int64 // complete headers
	dying    atomic.Bool
	held     chan struct{} // the first requests wait for it
}

func NewMortal(t *testing.T) *Mortal {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	m := &Mortal{Listener: l, held: make(chan struct{})}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() { m.serve(c) })
		}
	})
	t.Cleanup(func() { _ = l.Close(); all.Wait() })
	return m
}

func (m *Mortal) serve(c net.Conn) {
	defer func() { _ = c.Close() }()
	requests := bufio.NewReader(c)
	for first := true; ; first = false {
		r, err := http.ReadRequest(requests)
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		m.Received.Add(1)
		if first {
			<-m.held
		} else if m.dying.Load() {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
	}
}

// URL is the upstream's URL.
func (m *Mortal) URL() string { return "http://" + m.Addr().String() + "/fares" }

// Keep makes n idle connections of the base to the upstream.
func (m *Mortal) Keep(t *testing.T, base http.RoundTripper, n int) {
	var all sync.WaitGroup
	for range n {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, m.URL(), nil)
		require.NoError(t, err)
		all.Go(func() {
			response, err := base.RoundTrip(r)
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = io.Copy(io.Discard, response.Body)
			_ = response.Body.Close()
		})
	}
	require.Eventually(t, func() bool { return m.Received.Load() == int64(n) }, time.Minute, time.Millisecond)
	close(m.held)
	all.Wait()
	m.Received.Store(0)
	m.dying.Store(true)
}

// NewRefuser is an upstream over HTTP/2 that reads requests and resets their streams.
func NewRefuser(t *testing.T, code uint32) (string, *atomic.Int64) {
	certificate := httptest.NewUnstartedServer(nil)
	certificate.StartTLS()
	defer certificate.Close()
	config := &tls.Config{Certificates: certificate.TLS.Certificates, NextProtos: []string{"h2"}}
	l, err := tls.Listen("tcp", "127.0.0.1:0", config)
	require.NoError(t, err)
	received, ended := new(atomic.Int64), make(chan struct{})
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			all.Go(func() {
				defer func() { _ = c.Close() }()
				all.Go(func() { <-ended; _ = c.Close() })
				_, _ = io.CopyN(io.Discard, c, int64(len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")))
				_, _ = c.Write([]byte{3: 4, 8: 0}) // SETTINGS
				for {
					frame := make([]byte, 9)
					if _, err := io.ReadFull(c, frame); err != nil {
						return
					}
					_, _ = io.CopyN(io.Discard, c, int64(binary.BigEndian.Uint32(frame)>>8))
					if frame[3] == 1 { // HEADERS
						received.Add(1)
						reset := append([]byte{2: 4, 3: 3, 4: 0}, frame[5:]...) // RST_STREAM
						_, _ = c.Write(binary.BigEndian.AppendUint32(reset, code))
					}
				}
			})
		}
	})
	t.Cleanup(func() { _ = l.Close(); all.Wait() })
	t.Cleanup(func() { close(ended) })
	return l.Addr().String(), received
}

package main

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A client does not get past a row by another way to write its path.
func TestTargets(t *testing.T) {
	g, err := start(t.Context(), options{listen: "127.0.0.1:0"})
	require.NoError(t, err)
	defer g.close()
	ask := func(line string) int {
		c, err := net.Dial("tcp", strings.TrimPrefix(g.url, "http://"))
		require.NoError(t, err)
		defer func() { _ = c.Close() }()
		require.NoError(t, c.SetDeadline(time.Now().Add(30*time.Second)))
		_, err = fmt.Fprintf(c, "%s HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", line)
		require.NoError(t, err)
		answer, err := http.ReadResponse(bufio.NewReader(c), nil)
		require.NoError(t, err)
		_ = answer.Body.Close()
		return answer.StatusCode
	}
	for _, target := range []string{"http:http://h/ibe/Ticket", "/ibe%2fTicket", "http://h", "*"} {
		require.Equal(t, http.StatusBadRequest, ask("POST "+target), target)
	}
	require.Equal(t, http.StatusBadRequest, ask("OPTIONS *"))
	require.Equal(t, http.StatusBadRequest, ask("CONNECT h:443"))
	began := time.Now()
	for range 3 {
		require.Equal(t, http.StatusOK, ask("POST //ibe/./Tick%65t"))
	}
	require.Greater(t, time.Since(began), 1500*time.Millisecond, "the row of 1/s counts them, and its calls wait")
}

//go:build unix

package gateway

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// 10,000 connections that send nothing, or half a header, keep nobody out for long, and cost memory for --max-connections of them.
func TestManyConnections(t *testing.T) {
	const most = 2000
	var files syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files))
	all := min(10_000, int(files.Cur)-2*most) // each that was accepted has two
	require.Greater(t, all, most, "%d files may be open (ulimit -n)", files.Cur)
	_, addr := places(t, "--max-connections", fmt.Sprint(most), "--header-timeout", "1s", "--idle-timeout", "1s")
	memory := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapInuse + m.StackInuse
	}
	before := memory()
	var open []net.Conn
	defer func() {
		for _, c := range open {
			_ = c.Close()
		}
	}()
	dialer := net.Dialer{Timeout: 5 * time.Second}
	for i := range all {
		c, err := dialer.Dial("tcp", addr)
		if err != nil { // the queue of the kernel is full
			break
		}
		open = append(open, c)
		if i%2 == 0 {
			_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\nX: "+strings.Repeat("x", 4000))
		}
	}
	grown := int64(memory()) - int64(before)
	t.Logf("%d connections, %d MB", len(open), grown>>20)
	require.Greater(t, len(open), most)
	require.Less(t, grown, int64(most*64<<10), "64 KB for each that was accepted, those of the test included")
	require.Eventually(t, func() bool {
		client := http.Client{Timeout: 30 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
		response, err := client.Get("http://" + addr + "/other")
		if err != nil {
			return false
		}
		_ = response.Body.Close()
		return response.StatusCode == http.StatusOK
	}, 2*time.Minute, 100*time.Millisecond)
}

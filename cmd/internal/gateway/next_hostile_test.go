package gateway

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// A client that has read its whole response may send its next request at once, however long it is.
func TestHostileNextRequests(t *testing.T) {
	for _, args := range [][]string{nil, {"--inbound"}} {
		p, _ := listening(t, registry.Limit{Rate: 1e6, Concurrent: 4}, func(w http.ResponseWriter, r *http.Request) {
			n, err := io.Copy(io.Discard, r.Body)
			text := fmt.Sprint(n, " ", err) + strings.Repeat(" ", 40_000)
			w.Header().Set("Content-Length", strconv.Itoa(len(text)))
			_, _ = io.WriteString(w, text)
		}, args...)
		c := p.dial(t)
		answers := bufio.NewReader(c)
		body := strings.Repeat("x", 300_000)
		failed := 0
		const n = 300
		for i := range n {
			_, err := fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
			var response *http.Response
			if err == nil {
				response, err = http.ReadResponse(answers, nil)
			}
			var text []byte
			if err == nil {
				text, err = io.ReadAll(response.Body)
			}
			if err != nil || !strings.HasPrefix(string(text), "300000 <nil>") {
				if failed++; failed == 1 {
					t.Logf("request %d: %v %.60s", i, err, text)
				}
				_ = c.Close()
				c = p.dial(t)
				answers = bufio.NewReader(c)
			}
		}
		assert.Zero(t, failed, "requests lost, of %d, %v", n, args)
	}
}

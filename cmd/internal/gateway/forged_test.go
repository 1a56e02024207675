package gateway

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"
)

// A field that only proxies may send names no bucket for other clients: the upstream is not sent it either.
func TestKeyOfAProxysField(t *testing.T) {
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprint(w, r.Header["X-Forwarded-User"])
	}))
	defer upstream.Close()
	for _, tt := range []struct {
		args       []string
		sent, want string
	}{
		{nil, "[]", "/|"},
		{[]string{"--trusted-proxy", "127.0.0.1"}, "[made-up]", "/|made-up"},
	} {
		var asked keys
		server := newTestProxy(t, &asked, append([]string{"--upstream", upstream.URL, "--key", "path+header:X-Forwarded-User"}, tt.args...)...)
		_, _, body := send(t, server, "http://h/", http.Header{"X-Forwarded-User": {"made-up"}})
		require.Equal(t, tt.sent, body)
		require.Equal(t, []string{tt.want}, asked.all, "what was limited is what is sent")
	}
}

// CGI and its heirs write _ for a hyphen, and some of them for any character but letters and digits.
func TestFieldsThatCGIReadsAsOthers(t *testing.T) {
	var got http.Header
	upstream := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = r.Header }))
	defer upstream.Close()
	for key, header := range map[string]string{
		"X-Tenant": "X-Tenant: a\r\nX_Tenant: b\r\nX.Tenant: b\r\nx!tenant: b\r\nX~Tenant: b\r\nX.Forwarded.User: b\r\nX_Real-IP: b\r\nX.Custom: a\r\n",
		"X_Tenant": "X_Tenant: a\r\nX-Tenant: b\r\nX.Tenant: b\r\nX_Custom: a\r\n",
	} {
		server := newTestProxy(t, &keys{}, "--upstream", upstream.URL, "--key", "path+header:"+key)
		status, _ := raw(t, server, "GET / HTTP/1.1\r\nHost: h\r\n"+header+"\r\n")
		require.Equal(t, http.StatusOK, status)
		count := map[string]int{}
		for _, values := range got {
			count[values[0]]++
		}
		require.Zero(t, count["b"], "%s: %v", key, got)
		require.Equal(t, 2, count["a"], "%s: %v", key, got)
	}
}

// Fields that programs commonly read a client's address or its user from are not an ordinary client's to send.
func TestMoreFieldsOfProxies(t *testing.T) {
	var got http.Header
	upstream := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got = r.Header }))
	defer upstream.Close()
	header := http.Header{}
	for _, name := range []string{"Proxy-Client-Ip", "Wl-Proxy-Client-Ip", "Http-Client-Ip", "Http-X-Forwarded-For", "X-Forward-For", "Fly-Client-Ip", "Tailscale-User-Login"} {
		header[name] = []string{"192.0.2.1"}
	}
	send(t, newTestProxy(t, &keys{}, "--upstream", upstream.URL), "http://h/", header)
	for name := range header {
		require.NotContains(t, got, name)
	}
}

package httplimit_test

import (
	"cmp"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
	"github.com/go-tokenbucket/tokenbucket/httplimit"
)

// withKey sends each request with the key that has admitted it.
type withKey struct {
	secrets map[string]string // by the name of the key's bucket
	base    http.RoundTripper
}

func (k withKey) RoundTrip(r *http.Request) (*http.Response, error) {
	key := cmp.Or(gate.FromContext(r.Context()).Member, "key a") // none, if the call was not counted
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+k.secrets[key])
	return k.base.RoundTrip(r)
}

// Two API keys of one upstream. Each call is sent with the key whose permit is due first. A refusal, once both are used up, is a response 429 here. As
// a reverse proxy this serves programs of any language.
func Example_twoKeys() {
	upstream := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.Header.Get("Authorization")) }))
	defer upstream.Close()
	target, _ := url.Parse(upstream.URL)

	store := tokenbucket.NewMemoryStore() // or NewRedisScriptStore(client), for a fleet
	first, err := tokenbucket.NewSmoothBursty("key a", 0.1, tokenbucket.WithStore(store))
	if err != nil {
		panic(err)
	}
	second, err := tokenbucket.NewSmoothBursty("key b", 0.1, tokenbucket.WithStore(store))
	if err != nil {
		panic(err)
	}
	either, err := tokenbucket.Any(first, second)
	if err != nil {
		panic(err)
	}
	limited, err := httplimit.NewTransport(gate.One(either, 500*time.Millisecond), httplimit.WithRefusalResponse(),
		httplimit.WithBase(withKey{map[string]string{"key a": "alpha", "key b": "beta"}, http.DefaultTransport}))
	if err != nil {
		panic(err)
	}
	proxy := &httputil.ReverseProxy{Rewrite: func(r *httputil.ProxyRequest) { r.SetURL(target) }, Transport: limited}

	for range 3 {
		w := httptest.NewRecorder()
		proxy.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/fares", nil))
		if w.Code == http.StatusTooManyRequests {
			fmt.Println(w.Code)
			continue
		}
		fmt.Println(w.Code, w.Body)
	}
	// Output:
	// 200 Bearer alpha
	// 200 Bearer beta
	// 429
}

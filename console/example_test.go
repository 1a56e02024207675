package console_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket/console"
)

// A program with a mux of its own serves the console under a prefix. Without an Editor the pages change nothing, and without Access they
// serve this machine only.
func ExampleNew() {
	client := redis.NewClient(&redis.Options{Addr: "localhost:6379"})
	defer func() { _ = client.Close() }()
	c, err := console.New(console.Config{Source: console.NewRedisSource(client, "tokenbucket:")})
	if err != nil {
		panic(err)
	}
	mux := http.NewServeMux()
	mux.Handle("/console/", http.StripPrefix("/console", c))

	request := httptest.NewRequest(http.MethodGet, "http://localhost/console/", nil)
	request.RemoteAddr = "203.0.113.7:50000"
	response := httptest.NewRecorder()
	mux.ServeHTTP(response, request)
	fmt.Println("from elsewhere:", response.Code)
	// Output: from elsewhere: 403
}

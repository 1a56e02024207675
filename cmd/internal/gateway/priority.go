package gateway

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// parsePriority parses the setting of the priority. Its field is one that only trusted proxies may send, so a client's is neither honoured
// nor forwarded.
func (c *config) parsePriority() error {
	value := c.options.priority
	if value == "none" {
		return nil
	}
	kind, name, ok := strings.Cut(value, ":")
	if !ok || kind != "header" || !validHeader(name) {
		return c.bad("priority", fmt.Sprintf("%q", value), "none or header:NAME")
	}
	c.priority = http.CanonicalHeaderKey(name)
	c.key.fields.proxies = append(c.key.fields.proxies, c.priority)
	return nil
}

// prioritized returns the context of a request with its priority.
func (c *config) prioritized(r *http.Request) context.Context {
	ctx := r.Context()
	if c.priority == "" || !fromTrustedProxy(r, c.proxies) {
		return ctx
	}
	if p := lowestOf(r.Header[c.priority]); p != tokenbucket.Normal {
		return gate.WithPriority(ctx, p)
	}
	return ctx
}

// lowestOf returns the lowest priority of the values of a field, whose lines may be lists. A value that names none is Normal.
func lowestOf(lines []string) (lowest tokenbucket.Priority) {
	for _, line := range lines {
		for value := range strings.SplitSeq(line, ",") {
			if p, err := tokenbucket.ParsePriority(strings.Trim(value, " \t")); err == nil {
				lowest = max(lowest, p)
			}
		}
	}
	return lowest
}

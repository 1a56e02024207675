package gateway

import (
	"bytes"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A server that refuses connections cannot be reached, as check says, however short the time limit of a call is.
func TestCheckRefused(t *testing.T) {
	t.Parallel()
	target, err := parseRedis("127.0.0.1:1")
	require.NoError(t, err)
	c := &config{redis: target}
	c.storeTimeout = 400 * time.Millisecond // 1.2 s for the first reply
	var out bytes.Buffer
	(&checker{config: c, to: &out}).buckets(t.Context())
	require.Contains(t, out.String(), "FAIL  redis cannot be reached: ")
	require.Contains(t, out.String(), "connection refused")
}

package rows

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// The latest version of each ended rule is kept, but not for ever.
func TestPastIsBounded(t *testing.T) {
	var p past
	p.put("early", ended{bucket: 1})
	for i := range 10 * maxPast {
		p.put(fmt.Sprint(i), ended{bucket: int64(i)})
		require.LessOrEqual(t, len(p.new)+len(p.old), 2*maxPast)
	}
	_, ok := p.get("early")
	require.False(t, ok)
	last := 10*maxPast - 1
	for _, i := range []int{last, last - maxPast + 1} {
		e, ok := p.get(fmt.Sprint(i))
		require.True(t, ok)
		require.Equal(t, int64(i), e.bucket)
	}
	p.put(fmt.Sprint(last-maxPast+1), ended{bucket: 7})
	e, _ := p.get(fmt.Sprint(last - maxPast + 1))
	require.Equal(t, int64(7), e.bucket)
}

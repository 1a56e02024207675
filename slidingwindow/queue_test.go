package slidingwindow

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Calls that are put back are sent before those that have arrived since, in their order.
func TestPutBackInFront(t *testing.T) {
	q := queue{most: 10}
	first, second, third := &call{n: 1, sent: true}, &call{n: 2, sent: true}, &call{n: 4}
	q.push(third)
	q.putBack([]*call{first, second})
	require.False(t, first.sent || second.sent)
	require.Equal(t, []*call{first, second, third}, []*call{q.next(), q.next(), q.next()})
	require.Nil(t, q.next())
}

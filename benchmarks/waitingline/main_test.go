package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// The scenes of the picture keep the order, whichever caller leaves, and no other process gets B's permits. Permits that are overdue by 250
// ms and by 150 ms lapse; one that is overdue by 50 ms is used.
func TestLineScenes(t *testing.T) {
	granted, left, stopped := lineScenes()
	require.Equal(t, owners{"a1", "a2", "a3", "a4", ofB, ofB, ofB, "a5", "a6", "a7", "a8"}, granted)
	require.Equal(t, owners{"a1", "a3", "a4", "a5", ofB, ofB, ofB, "a6", "a7", "a8", returned}, left)
	require.Equal(t, owners{"a1", lapsed, lapsed, "a2", ofB, ofB, ofB, "a3", "a4", "a5", "a6"}, stopped)
}

// The picture in docs is what the program draws now.
func TestPictureInDocs(t *testing.T) {
	got, err := os.ReadFile(filepath.Join("..", "..", "docs", "waiting-line.svg"))
	require.NoError(t, err)
	require.True(t, string(got) == string(render()), "docs/waiting-line.svg is old: run go run ./benchmarks/waitingline > docs/waiting-line.svg")
}

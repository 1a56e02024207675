package console_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/fleet/fleettest"
)

// The first page of ten thousand limits, when the figures are there.
func BenchmarkFirstPage(b *testing.B) {
	c, err := console.New(console.Config{Source: fleettest.New(3, fleettest.Many(10_000)...), Beat: time.Minute})
	require.NoError(b, err)
	defer c.Close()
	ask(c, local("GET", "/"))
	for b.Loop() {
		ask(c, local("GET", "/"))
	}
}

// One beat of a console of ten thousand limits in three instances, without the source's share.
func BenchmarkBeat(b *testing.B) {
	source := fleettest.New(3, fleettest.Many(10_000)...)
	past, err := source.Snapshot(b.Context())
	require.NoError(b, err)
	time.Sleep(100 * time.Millisecond)
	now, err := source.Snapshot(b.Context())
	require.NoError(b, err)
	for b.Loop() {
		console.Beat(past, now)
	}
}

package console_test

import (
	"database/sql"
	"log/slog"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// A row that somebody else has changed in the database is seen within three seconds, and a table that cannot be read within five is told in
// words: by a table, a registry, Redis and a browser, all real.
func TestLiveUpdateOfATable(t *testing.T) {
	client := redistest.Start(t).Client(t)
	file := "file:" + filepath.Join(t.TempDir(), "limits.db") + "?_pragma=busy_timeout(5000)"
	connect := func() *sql.DB {
		db, err := sql.Open("sqlite", file)
		require.NoError(t, err)
		t.Cleanup(func() { _ = db.Close() })
		return db
	}
	here, elsewhere := connect(), connect()
	change := func(statement string) {
		_, err := elsewhere.Exec(statement)
		require.NoError(t, err)
	}
	require.NoError(t, sqlsource.CreateTable(t.Context(), elsewhere, sqlsource.SQLite))
	change("INSERT INTO t_ratelimite_conf (interfaceUrl, rateLimit, cache) VALUES ('/ibe/AvailFare', 5, 0.5)")

	source, err := sqlsource.New(here, sqlsource.SQLite)
	require.NoError(t, err)
	meter := fleet.NewMeter()
	limits, err := registry.New(source, tokenbucket.NewMemoryStore(), registry.WithInterval(300*time.Millisecond), registry.WithHook(meter.Loaded),
		registry.WithLimiterOptions(tokenbucket.WithObserver(meter.Observer())), registry.WithLogger(slog.New(slog.DiscardHandler)))
	require.NoError(t, err)
	defer limits.Close()
	meter.Follow(limits)
	publisher, err := fleet.NewPublisher(client, meter)
	require.NoError(t, err)
	defer func() { _ = publisher.Close(t.Context()) }()
	go func() { // calls, since a bucket's rate is that of the last one
		for t.Context().Err() == nil {
			_, _ = limits.Allow(t.Context(), "/ibe/AvailFare")
		}
	}()

	p := open(t, serve(t, console.Config{Source: fleet.NewReader(client)}))
	rate := func(text string) {
		p.waitFor(`document.querySelector(".virtual .c-rate")?.textContent === "` + text + `"`)
	}
	within := func(most time.Duration, what string, wait func()) {
		began := time.Now()
		wait()
		took := time.Since(began)
		t.Logf("%s after %v", what, took.Round(10*time.Millisecond))
		require.Less(t, took, time.Duration(float64(most)*redistest.Busy()), what)
	}
	rate("5.0")
	for _, r := range []string{"8", "6", "7"} {
		change("UPDATE t_ratelimite_conf SET rateLimit = " + r)
		within(3*time.Second, "a rate of "+r, func() { rate(r + ".0") })
	}
	change("ALTER TABLE t_ratelimite_conf RENAME TO gone")
	within(5*time.Second, "no table", func() { p.waitFor(`document.getElementById("problems").textContent.includes("loads fail")`) })
	change("ALTER TABLE gone RENAME TO t_ratelimite_conf")
	within(5*time.Second, "a table again", func() { p.waitFor(`!document.getElementById("problems").textContent.includes("loads fail")`) })
}

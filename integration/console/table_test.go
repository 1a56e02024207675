package console_test

import (
	"database/sql"
	"log/slog"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/console"
	"github.com/go-tokenbucket/tokenbucket/console/fleet"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// A row that another client has changed in the database is shown within three seconds, and a database that was stopped is reported in words
// within five: by a database, a registry, Redis and a browser, all real.
func TestLiveUpdateOfATable(t *testing.T) {
	client := redistest.Start(t).Client(t)
	server := dbtest.MariaDB(t)
	connect := func() *sql.DB {
		db, err := sql.Open("mysql", server.DSN())
		require.NoError(t, err)
		t.Cleanup(func() { _ = db.Close() })
		return db
	}
	here, elsewhere := connect(), connect()
	change := func(statement string) {
		_, err := elsewhere.Exec(statement)
		require.NoError(t, err)
	}
	require.NoError(t, sqlsource.CreateTable(t.Context(), elsewhere, sqlsource.MySQL))
	change("INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES ('/ibe/AvailFare', 5, 0.5)")

	source, err := sqlsource.New(here, sqlsource.MySQL)
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
			_, _ = limits.Enter(t.Context(), "/ibe/AvailFare")
			time.Sleep(10 * time.Millisecond) // so that the browser has a processor, too
		}
	}()

	p := open(t, serve(t, console.Config{Source: fleet.NewReader(client)}))
	rate := func(text string) {
		p.waitFor(`document.querySelector(".virtual .c-rate")?.textContent === "` + text + `"`)
	}
	rate("5")
	for _, r := range []string{"8", "6", "7"} {
		change("UPDATE t_ratelimite_conf SET rate = " + r)
		p.within(3*time.Second, "a rate of "+r, func() { rate(r) })
	}
	server.Kill()
	p.within(5*time.Second, "no database", func() { p.waitFor(`document.getElementById("problems").textContent.includes("loads fail")`) })
	require.NoError(t, server.Restart())
	p.within(5*time.Second, "a database again", func() { p.waitFor(`!document.getElementById("problems").textContent.includes("loads fail")`) })
	change("UPDATE t_ratelimite_conf SET rate = 9")
	p.within(3*time.Second, "a rate of 9", func() { rate("9") })
}

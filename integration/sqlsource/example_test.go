package sqlsource_test

import (
	"context"
	"database/sql"
	"fmt"

	_ "modernc.org/sqlite"

	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

func Example() {
	ctx := context.Background()
	db, err := sql.Open("sqlite", "file:example?mode=memory&cache=shared")
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	db.SetMaxOpenConns(1) // this one lives in memory, as long as a connection to it
	if err := sqlsource.CreateTable(ctx, db, sqlsource.SQLite); err != nil {
		panic(err)
	}
	_, err = db.ExecContext(ctx, `INSERT INTO t_ratelimite_conf (name, rate, max_wait, disabled) VALUES
		('/ibe/AvailFare', 5, 0.3, 0), ('/ibe/Book', -1, NULL, 0), ('/ibe/Test', NULL, NULL, 1)`)
	if err != nil {
		panic(err)
	}

	source, err := sqlsource.New(db, sqlsource.SQLite)
	if err != nil {
		panic(err)
	}
	table, err := source.Load(ctx)
	if err != nil {
		panic(err)
	}
	for _, l := range table.Limits {
		fmt.Println(l.Name, l.Disabled, l.Rate, l.MaxWait)
	}
	for _, e := range table.Rejected {
		fmt.Println(e.Error())
	}
	// Output:
	// /ibe/AvailFare false 5 300ms
	// /ibe/Test true 0 0s
	// registry: row 2: bucket "/ibe/Book": rate -1: want a number of permits per second from 1e-9 to 2^53, or 0: nothing passes
}

// A table that has other names, and says more.
func Example_columns() {
	ctx := context.Background()
	db, err := sql.Open("sqlite", "file:columns?mode=memory&cache=shared")
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	db.SetMaxOpenConns(1)
	names := []sqlsource.Option{
		sqlsource.WithTable("limits"),
		sqlsource.WithColumns(sqlsource.Columns{Name: "bucket", Rate: "per_second", Burst: "burst", Warmup: "warmup", Quota: "quota"}),
	}
	if err := sqlsource.CreateTable(ctx, db, sqlsource.SQLite, names...); err != nil {
		panic(err)
	}
	_, err = db.ExecContext(ctx, `INSERT INTO limits (bucket, per_second, burst, warmup, quota) VALUES
		('burst', 5, 20, NULL, NULL), ('cold', 5, NULL, 4, NULL), ('counted', 5, NULL, NULL, 1)`)
	if err != nil {
		panic(err)
	}
	source, err := sqlsource.New(db, sqlsource.SQLite, names...)
	if err != nil {
		panic(err)
	}
	table, err := source.Load(ctx)
	if err != nil {
		panic(err)
	}
	for _, l := range table.Limits {
		fmt.Println(l.Name, l.Rate, l.Burst != nil, l.Warmup, l.Quota)
	}
	// Output:
	// burst 5 true 0s false
	// cold 5 false 4s false
	// counted 5 false 0s true
}

func Example_createTable() {
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	db.SetMaxOpenConns(1)
	for range 2 { // the second time it is there
		if err := sqlsource.CreateTable(context.Background(), db, sqlsource.SQLite); err != nil {
			panic(err)
		}
	}
	var name string
	if err := db.QueryRow("SELECT name FROM sqlite_schema WHERE type = 'table' AND name LIKE 't_%'").Scan(&name); err != nil {
		panic(err)
	}
	fmt.Println(name)
	// Output:
	// t_ratelimite_conf
}

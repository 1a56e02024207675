package editor_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	"github.com/go-tokenbucket/tokenbucket/console/editor"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// An operator's program raises a limit, and records who did so and why. If the row has changed meanwhile, nothing is written.
func ExampleEditor_Change() {
	ctx := context.Background()
	db, err := sql.Open("mysql", "gateway@tcp(localhost:3306)/limits?parseTime=true") // with a driver of your choice
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = db.Close() }()
	source, err := sqlsource.New(db, sqlsource.MySQL)
	if err != nil {
		panic(err)
	}
	rows, err := editor.New(db, source)
	if err != nil {
		panic(err)
	}
	row, err := rows.Get(ctx, "/ibe/AvailFare")
	if err != nil {
		panic(err)
	}
	rate := "8"
	entry, err := rows.Change(ctx, editor.Change{
		Name: row.Name, From: row.Version, To: editor.Values{"rateLimit": &rate},
		Who: "operator", Why: "the upstream allows 8/s from today on",
	})
	switch {
	case errors.Is(err, editor.ErrConflict):
		fmt.Println("the row has changed meanwhile: read it again")
	case err != nil:
		panic(err)
	default:
		fmt.Println("change", entry.ID, "can be undone")
	}
}

package sqlsource_test

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// Limits in a table of SQLite, made by this program. The driver is the program's: here one that is called sqlite.
func Example() {
	db, err := sql.Open("sqlite", "limits.db")
	if err != nil {
		panic(err)
	}
	ctx := context.Background()
	if err := sqlsource.CreateTable(ctx, db, sqlsource.SQLite); err != nil {
		panic(err)
	}
	source, err := sqlsource.New(db, sqlsource.SQLite)
	if err != nil {
		panic(err)
	}
	limits, err := registry.New(source, tokenbucket.NewMemoryStore())
	if err != nil {
		panic(err) // the table cannot be read
	}
	defer limits.Close()
	a, err := limits.Enter(ctx, "/ibe/AvailFare")
	if err != nil {
		panic(err)
	}
	defer a.Leave()
	fmt.Println(a.OK)
}

// The statements that make the table, for a migration tool.
func ExampleSchema() {
	schema, err := sqlsource.Schema(sqlsource.SQLite, sqlsource.WithTable("limits"))
	if err != nil {
		panic(err)
	}
	for line := range strings.Lines(schema) {
		if strings.HasPrefix(line, "CREATE") {
			fmt.Print(line)
		}
	}
	// Output:
	// CREATE TABLE IF NOT EXISTS `limits` (
	// CREATE TRIGGER IF NOT EXISTS `limits_modified` AFTER UPDATE ON `limits` FOR EACH ROW
}

package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"

	_ "github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// rows inserts the limits, in SQL that all three databases accept. A row has a name, calls in any second, and how many seconds a call
// may wait.
const rows = `INSERT INTO t_ratelimite_conf (name, rate, max_wait) VALUES
	('/ibe/AvailFare', 5, 0.5),
	('/ibe/PnrRetrieve', 3, 0.5),
	('/ibe/Ticket', 1, 2)`

// createLimits creates the tables, and inserts rows into empty ones.
func createLimits(ctx context.Context, db *sql.DB, d sqlsource.Dialect) error {
	if err := sqlsource.CreateTable(ctx, db, d); err != nil {
		return err
	}
	if err := sqlsource.CreateSwitchTable(ctx, db, d); err != nil {
		return err
	}
	for table, insert := range map[string]string{
		"t_ratelimite_conf":   rows,
		"t_ratelimite_switch": "INSERT INTO t_ratelimite_switch (name, enabled) VALUES ('global', 1)",
	} {
		var n int
		if err := db.QueryRowContext(ctx, "SELECT count(*) FROM "+table).Scan(&n); err != nil {
			return err
		}
		if n > 0 {
			continue
		}
		if _, err := db.ExecContext(ctx, insert); err != nil {
			return err
		}
	}
	return nil
}

// explain prints what to try.
func (g *gateway) explain(out io.Writer) {
	o := &g.options
	client := "sqlite3 " + o.file
	own := "--db " + o.file
	switch o.dialect() {
	case sqlsource.MySQL:
		client, own = "mysql -h HOST -u USER -p DATABASE -e", "--mysql DSN"
	case sqlsource.PostgreSQL:
		client, own = "psql DSN -c", "--postgres DSN"
	}
	buckets := "the Redis at " + o.redis
	if o.redis == "" {
		buckets = "an embedded Redis (miniredis); with --redis host:port several gateways share them"
	}
	fmt.Fprintf(out, `The gateway serves on %[1]s. The limits are in the database, the buckets in %[2]s.

A call, and ten at once, of which the row lets some pass:

  curl -i -X POST %[1]s/ibe/AvailFare
  for i in 1 2 3 4 5 6 7 8 9 10; do curl -s -o /dev/null -w '%%{http_code} ' -X POST %[1]s/ibe/AvailFare & done; wait

Change the limit: within a second, another number of the ten passes. The airline accepts no more than 10 a second:

  %[3]s "UPDATE t_ratelimite_conf SET rate = 1 WHERE name = '/ibe/AvailFare'"

Limit nothing, and limit again. What the airline then refuses, it logs here:

  %[3]s "UPDATE t_ratelimite_switch SET enabled = 0"
  %[3]s "UPDATE t_ratelimite_switch SET enabled = 1"

Without that program, the example executes SQL itself:

  go run ./examples/gateway %[4]s --exec "UPDATE t_ratelimite_conf SET rate = 5"

Ctrl-C ends it.
`, g.url, buckets, client, own)
}

package sqlsource

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// instants are digits that a time zone would spoil: in winter and summer, in the hours that are skipped or come twice, at
// the ends, and with all their fractions.
var instants = []string{
	"1970-01-01 00:00:01.000000", "2024-01-15 12:00:00.000000", "2024-07-15 23:59:59.999999", "2024-03-31 02:30:00.000001",
	"2024-03-10 02:30:00.500000", "2024-10-27 02:30:00.123456", "2024-11-03 01:30:00.654321", "2024-02-29 00:00:00.000000",
	"2037-12-31 23:59:59.000000",
}

// TestTimeZones: a time is the same number for every process, however its session and driver are set up.
func TestTimeZones(t *testing.T) {
	types := map[string][]string{
		"mariadb":    {"DATETIME(6)", "TIMESTAMP(6) NULL"},
		"postgresql": {"timestamp", "timestamptz"},
		"sqlite":     {"DATETIME", "TEXT", "TIMESTAMP"},
	}
	utc := map[string]string{"mariadb": "&time_zone=%27%2B00:00%27", "postgresql": "&TimeZone=UTC"}
	for _, b := range backends {
		for i, kind := range types[b.name] {
			t.Run(b.name+"/"+kind, func(t *testing.T) {
				t.Parallel()
				_, dsn := b.place(t)
				writer := open(t, b.driver, dsn+utc[b.name])
				table := fmt.Sprint("zones", i)
				exec(t, writer, "CREATE TABLE "+table+" (configId INT, interfaceUrl VARCHAR(40), rateLimit INT, cache FLOAT, status INT, lastModifyTime "+kind+")")
				want := make(map[string]int64)
				for j, digits := range instants {
					at, err := time.Parse("2006-01-02 15:04:05", digits)
					require.NoError(t, err)
					want[digits] = at.UnixMicro()
					if b.dialect == sqlsource.SQLite {
						want[digits] = at.Truncate(time.Millisecond).UnixMicro()
					}
					exec(t, writer, fmt.Sprintf("INSERT INTO %s VALUES (%d, '%s', 1, NULL, 1, '%s')", table, j, digits, digits))
				}
				exec(t, writer, fmt.Sprintf("INSERT INTO %s VALUES (99, 'none', 1, NULL, 1, NULL)", table))
				want["none"] = 0
				for _, params := range b.zones {
					got := load(t, b, open(t, b.driver, dsn+params), sqlsource.WithTable(table))
					require.Empty(t, got.Rejected, params)
					versions := make(map[string]int64)
					for _, l := range got.Limits {
						versions[l.Name] = l.Version
						require.Equal(t, 500*time.Millisecond, l.MaxWait)
					}
					require.Equal(t, want, versions, params)
				}
			})
		}
	}
}

// TestZonesDiffer: the sessions of TestTimeZones do see different times.
func TestZonesDiffer(t *testing.T) {
	for _, b := range backends[:2] {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			_, dsn := b.place(t)
			seen := make(map[string]bool)
			for _, params := range b.zones {
				var hour string
				query := "SELECT CAST(FROM_UNIXTIME(1700000000) AS CHAR)"
				if b.dialect == sqlsource.PostgreSQL {
					query = "SELECT to_timestamp(1700000000)::timestamp::text"
				}
				require.NoError(t, open(t, b.driver, dsn+params).QueryRowContext(ctx, query).Scan(&hour))
				seen[hour] = true
			}
			require.GreaterOrEqual(t, len(seen), 3)
		})
	}
}

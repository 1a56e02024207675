package sqlsource

import (
	"database/sql"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

// A created table holds names as long as a bucket's may be, and two changes within one second have different times.
func TestCreatedTable(t *testing.T) {
	each(t, func(t *testing.T, b backend, db *sql.DB, _ string) {
		require.NoError(t, sqlsource.CreateTable(ctx, db, b.dialect))
		long := strings.Repeat("ab", 256)
		b.insert(t, db, conf, "name, rate", long, 5)
		var versions []int64
		for _, rate := range []string{"5", "6", "7"} {
			exec(t, db, "UPDATE "+conf+" SET rate = "+rate)
			table := load(t, b, db)
			require.Len(t, table.Limits, 1)
			require.Equal(t, long, table.Limits[0].Name)
			versions = append(versions, table.Limits[0].Version)
		}
		require.Less(t, versions[1], versions[2])
	})
}

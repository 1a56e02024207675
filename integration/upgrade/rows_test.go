package upgrade

import (
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/integration/upgrade/task"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
)

// TestRowsChange changes a row while the processes of a fleet are replaced. Whichever process loads a change first, and whatever its time says, the row is in
// force in the bucket and in the window that both releases share, and stays so.
func TestRowsChange(t *testing.T) {
	t.Parallel()
	directions(t, func(t *testing.T, from release) {
		server := dbtest.SharedMariaDB(t)
		name := fmt.Sprintf("rows_%d", from)
		db, err := sql.Open("mysql", server.DSN())
		require.NoError(t, err)
		defer func() { require.NoError(t, db.Close()) }()
		exec := func(statement string, args ...any) {
			t.Helper()
			_, err := db.ExecContext(t.Context(), statement, args...)
			require.NoError(t, err)
		}
		exec("CREATE DATABASE " + name)
		dsn := strings.Replace(server.DSN(), "/test?", "/"+name+"?", 1)
		client := redis.NewClient(&redis.Options{Addr: redistest.Shared(t).Addr})
		defer func() { require.NoError(t, client.Close()) }()
		ask(t, previous, task.Job{Redis: client.Options().Addr, Tasks: []task.Task{{Kind: task.Create, Name: "create", DSN: dsn}}})
		exec("ALTER TABLE " + name + ".t_ratelimite_conf MODIFY lastModifyTime DATETIME(6) DEFAULT CURRENT_TIMESTAMP(6) ON UPDATE CURRENT_TIMESTAMP(6)")
		exec("INSERT INTO " + name + ".t_ratelimite_conf (interfaceUrl, rateLimit, cache, `window`, windowLimit) VALUES ('" + name + "', 50, 0.5, 1, 1000)")

		job := task.Job{Redis: client.Options().Addr, Tasks: []task.Task{{Kind: task.Gateway, Name: name, Store: "script", DSN: dsn, Callers: 4, Interval: 100 * time.Millisecond}}}
		var fleet []*worker.Worker[task.Event]
		start := func(r release) {
			p := r.start(t, job)
			await(t, r, p, job, 5)
			fleet = append(fleet, p)
		}
		end := func() {
			fleet[0].End()
			fleet = slices.Delete(fleet, 0, 1)
		}
		step := func(what string, rate, window int, change string) {
			t.Helper()
			if change != "" {
				change = ", lastModifyTime = " + change
			}
			exec(fmt.Sprintf("UPDATE %[1]s.t_ratelimite_conf SET rateLimit = %d, windowLimit = %d%s WHERE interfaceUrl = '%[1]s'", name, rate, window, change))
			var bucket, counts string
			keys, err := client.Keys(t.Context(), "slidingwindow:{"+name+"}:*").Result()
			require.NoError(t, err)
			require.Len(t, keys, 1)
			inForce := func() error {
				bucket, counts = client.Get(t.Context(), "tokenbucket:{"+name+"}").Val(), client.Get(t.Context(), keys[0]).Val()
				if !strings.Contains(bucket, fmt.Sprintf(" now %d ", rate)) || !strings.Contains(counts, fmt.Sprintf(" limit=%d ", window)) {
					return fmt.Errorf("%s: bucket %q, window %q", what, bucket, counts)
				}
				return nil
			}
			began := time.Now()
			err = redistest.Poll(12*time.Second, inForce)
			t.Logf("%s: %v after %v: %.300s %.300s", what, err, time.Since(began), bucket, counts)
			require.NoError(t, err)
			for range 14 { // three loads of each process
				time.Sleep(25 * time.Millisecond)
				require.NoError(t, inForce(), "it was in force")
			}
		}
		start(from)
		step("one release", 60, 1060, "")
		start(from.other())
		step("both, a later time", 70, 1070, "")
		step("both, the same time", 80, 1080, "lastModifyTime")
		step("both, the last possible time in a millisecond", 90, 1090, "TIMESTAMPADD(MICROSECOND, 1023 - FLOOR(UNIX_TIMESTAMP(NOW(6)) * 1000000) % 1024, NOW(6))")
		step("both, the same time", 100, 1100, "lastModifyTime")
		step("both, an earlier time", 110, 1110, "lastModifyTime - INTERVAL 1 HOUR")
		step("both, an earlier time, again", 120, 1120, "lastModifyTime + INTERVAL 1 MINUTE")
		start(from)
		step("a process of before joins", 130, 1130, "NOW(6)")
		start(from.other())
		end()
		step("a process of before left", 140, 1140, "lastModifyTime")
		step("a process of before left", 150, 1150, "")
		end()
		end()
		step("the other release", 160, 1160, "")
		step("the other release", 170, 1170, "lastModifyTime")
		for len(fleet) > 0 {
			end()
		}
	})
}

package security

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
	"github.com/go-tokenbucket/tokenbucket/postgres/dbtest"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/killswitch"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

// failures are the errors of each part of the library on a client that does not work, each with a client of its own.
func failures(t *testing.T, open func() *redis.Client, timeout time.Duration) map[string]error {
	t.Helper()
	ctx := within(t, time.Minute)
	errs := map[string]error{}
	for name, store := range map[string]tokenbucket.Store{
		"script": tokenbucket.NewRedisScriptStore(open()), "lock": tokenbucket.NewRedisStore(open()),
	} {
		l, err := tokenbucket.NewSmoothBursty("x", 5, tokenbucket.WithStore(store), tokenbucket.WithStoreTimeout(timeout))
		require.NoError(t, err)
		_, errs[name] = l.Try(ctx)
		errs[name+" again"] = l.SetRate(ctx, 7)
	}
	s, err := semaphore.NewRedis(open(), "x", 1, semaphore.WithStoreTimeout(timeout), semaphore.WithLease(100*time.Millisecond))
	require.NoError(t, err)
	short, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	_, errs["semaphore"] = s.Acquire(short, 1)
	_ = s.Close(ctx)
	told := make(chan error, 1)
	w, err := slidingwindow.New("x", 5, time.Second, time.Second, slidingwindow.WithRedis(open()), slidingwindow.WithStoreTimeout(timeout),
		slidingwindow.WithObserver(slidingwindow.Observer{Trip: func(trip slidingwindow.Trip) {
			select {
			case told <- trip.Err:
			default:
			}
		}}))
	require.NoError(t, err)
	_, errs["window"] = w.Allow(ctx)
	select { // the observer is called when the caller may have returned
	case errs["window's trip"] = <-told:
	case <-time.After(patience):
		t.Error("the observer was not called")
	}
	sw, err := killswitch.NewRedis(open(), "switch", killswitch.WithTimeout(timeout))
	require.NoError(t, err)
	sw.Close()
	errs["setting a switch"] = sw.Set(ctx, false)
	if err := sw.Err(); err != nil { // reading one may be allowed where writing is not
		errs["switch"] = err
	}
	return errs
}

// silent requires that no error gives a password away.
func silent(t *testing.T, errs map[string]error) {
	t.Helper()
	for part, err := range errs {
		require.Error(t, err, part)
		for _, text := range []string{err.Error(), fmt.Sprintf("%+v %#v", err, err)} {
			require.NotContains(t, text, secret, part)
			require.NotContains(t, text, wrong, part)
		}
	}
}

// Whatever is wrong with Redis, no error and no log shows the password.
func TestNoPasswordOfRedis(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, says string // in the error of the script store
		password   string
		timeout    time.Duration
		harm       func(t *testing.T, s *redistest.Server, admin *redis.Client)
	}{
		{"wrong password", "WRONGPASS", wrong, patience, nil},
		{"no rights", "NOPERM", secret, patience, func(t *testing.T, _ *redistest.Server, admin *redis.Client) {
			require.NoError(t, admin.ACLSetUser(context.Background(), "user", "-@all").Err())
		}},
		{"refused", "refused", secret, 3 * time.Second, func(_ *testing.T, s *redistest.Server, _ *redis.Client) { s.Close() }},
		{"hung", "timeout", secret, 300 * time.Millisecond, func(t *testing.T, s *redistest.Server, _ *redis.Client) { require.NoError(t, s.Stop()) }},
		{"out of memory", "OOM", secret, patience, func(t *testing.T, _ *redistest.Server, admin *redis.Client) {
			require.NoError(t, admin.ConfigSet(context.Background(), "maxmemory", "1").Err())
		}},
		{"cannot save", "MISCONF", secret, patience, func(t *testing.T, _ *redistest.Server, admin *redis.Client) {
			ctx, dir := context.Background(), filepath.Join(t.TempDir(), "gone")
			require.NoError(t, os.Mkdir(dir, 0o755))
			require.NoError(t, admin.Do(ctx, "CONFIG", "SET", "dir", dir, "save", "3600 1000").Err())
			require.NoError(t, os.Remove(dir))
			_ = admin.BgSave(ctx).Err()
			require.NoError(t, redistest.Poll(patience, func() error {
				if info := admin.Info(ctx, "persistence").Val(); !strings.Contains(info, "rdb_last_bgsave_status:err") {
					return errors.New(info)
				}
				return nil
			}))
		}},
		{"replica", "READONLY|store timeout", secret, 300 * time.Millisecond, func(t *testing.T, _ *redistest.Server, admin *redis.Client) {
			require.NoError(t, admin.ReplicaOf(context.Background(), "127.0.0.1", "1").Err())
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t, "--enable-protected-configs", "local")
			admin := server.Client(t)
			ctx := context.Background()
			require.NoError(t, admin.ACLSetUser(ctx, "user", "on", ">"+secret, "allkeys", "allchannels", "+@all").Err())
			open := func() *redis.Client {
				return server.Client(t, func(o *redis.Options) {
					o.Username, o.Password, o.ReadTimeout, o.MaxRetries = "user", c.password, c.timeout, -1
				})
			}
			if c.password == secret { // which is right, and was sent
				require.NoError(t, open().Ping(ctx).Err())
			}
			if c.harm != nil {
				c.harm(t, server, admin)
			}
			errs := failures(t, open, c.timeout)
			silent(t, errs)
			require.Regexp(t, c.says, errs["script"].Error())
			t.Logf("%d errors, such as: %v", len(errs), errs["window"])
		})
	}
}

// database is a server with a user who has a password, and how a client says so.
type database struct {
	dialect sqlsource.Dialect
	driver  string
	server  *dbtest.Server
	dsn     func(password, addr, parameters string) string
	noTLS   string // the parameter that wants TLS, which the server has not
	bad     string // a parameter that is none
	denied  string // what the server says of a wrong password
}

func mariaDB(t *testing.T) database {
	server := dbtest.MariaDB(t)
	admin, err := sql.Open("mysql", server.DSN())
	require.NoError(t, err)
	defer func() { _ = admin.Close() }()
	for _, q := range []string{"CREATE USER 'gateway'@'%' IDENTIFIED BY '" + secret + "'", "GRANT ALL ON test.* TO 'gateway'@'%'"} {
		_, err = admin.Exec(q)
		require.NoError(t, err)
	}
	return database{
		sqlsource.MySQL, "mysql", server,
		func(password, addr, parameters string) string {
			return "gateway:" + password + "@tcp(" + addr + ")/test?" + parameters
		},
		"tls=true", "timeout=soon", "Access denied",
	}
}

func postgreSQL(t *testing.T) database {
	dir, err := os.MkdirTemp("", "hba") // not t.TempDir, whose parents only root may enter
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	hba := filepath.Join(dir, "hba")
	require.NoError(t, os.WriteFile(hba, []byte("host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n"), 0o644))
	server := dbtest.PostgreSQL(t, "-c", "hba_file="+hba)
	admin, err := sql.Open("pgx", server.DSN())
	require.NoError(t, err)
	defer func() { _ = admin.Close() }()
	for _, q := range []string{"CREATE USER gateway PASSWORD '" + secret + "'", "GRANT ALL ON SCHEMA public TO gateway"} {
		_, err = admin.Exec(q)
		require.NoError(t, err)
	}
	return database{
		sqlsource.PostgreSQL, "pgx", server,
		func(password, addr, parameters string) string {
			return "postgres://gateway:" + password + "@" + addr + "/postgres?" + parameters
		},
		"sslmode=require", "sslmode=soon", "password authentication failed",
	}
}

// tables are the errors of each part of the library on a database that does not work.
func tables(t *testing.T, d database, dsn string) map[string]error {
	t.Helper()
	db, err := sql.Open(d.driver, dsn)
	if err != nil { // it never gets as far as the library
		return map[string]error{"driver": err}
	}
	defer func() { _ = db.Close() }()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	source, err := sqlsource.New(db, d.dialect)
	require.NoError(t, err)
	errs := map[string]error{}
	_, errs["load"] = source.Load(ctx)
	errs["create"] = sqlsource.CreateTable(ctx, db, d.dialect)
	_, errs["registry"] = registry.New(source, tokenbucket.NewMemoryStore(), registry.WithLoadTimeout(patience))
	var told error
	sw, err := sqlsource.NewSwitch(db, d.dialect, sqlsource.WithPolling(killswitch.WithTimeout(patience),
		killswitch.WithHook(func(err error) { told = err })))
	require.NoError(t, err)
	sw.Close()
	errs["switch"], errs["switch's hook"] = sw.Err(), told
	ctx, cancel = context.WithTimeout(context.Background(), patience)
	defer cancel()
	errs["set"] = sw.Set(ctx, false)
	return errs
}

// Whatever is wrong with a database, no error and no log shows the password, nor when it goes away under a registry that follows
// it.
func TestNoPasswordOfDatabases(t *testing.T) {
	require.NoError(t, mysql.SetLogger(driverLog{}))
	for name, start := range map[string]func(*testing.T) database{"mariadb": mariaDB, "postgresql": postgreSQL} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := start(t)
			good := d.dsn(secret, d.server.Addr, "")
			db, err := sql.Open(d.driver, good)
			require.NoError(t, err)
			defer func() { _ = db.Close() }()
			require.NoError(t, db.Ping(), "the password is right")
			require.NoError(t, sqlsource.CreateTable(context.Background(), db, d.dialect))
			source, err := sqlsource.New(db, d.dialect)
			require.NoError(t, err)
			loads := make(chan registry.Load, 100)
			limits, err := registry.New(source, tokenbucket.NewMemoryStore(), registry.WithInterval(20*time.Millisecond),
				registry.WithLoadTimeout(patience), registry.WithHook(func(l registry.Load) {
					select {
					case loads <- l:
					default:
					}
				}))
			require.NoError(t, err)
			defer limits.Close()

			closed, err := net.Listen("tcp", "127.0.0.1:0")
			require.NoError(t, err)
			require.NoError(t, closed.Close())
			for what, dsn := range map[string]string{
				"wrong password": d.dsn(wrong, d.server.Addr, ""),
				"host down":      d.dsn(secret, closed.Addr().String(), ""),
				"no TLS":         d.dsn(secret, d.server.Addr, d.noTLS),
				"bad parameter":  d.dsn(secret, d.server.Addr, d.bad),
				"bad port":       d.dsn(secret, "127.0.0.1:x", ""),
				"bad escape":     d.dsn("%zz"+secret, d.server.Addr, "x=%"),
			} {
				errs := tables(t, d, dsn)
				silent(t, errs)
				if what == "wrong password" {
					require.ErrorContains(t, errs["load"], d.denied)
					require.Len(t, errs, 6)
				}
			}

			d.server.Kill()
			away := func() error {
				for {
					select {
					case l := <-loads:
						if l.Err != nil {
							return l.Err
						}
					case <-time.After(patience):
						return nil
					}
				}
			}
			errs := map[string]error{"hook": away(), "stats": limits.Stats().Err, "reload": limits.Reload(context.Background())}
			silent(t, errs)
			t.Logf("such as: %v", errs["hook"])
			silent(t, tables(t, d, good))
		})
	}
}

// driverLog takes down what the driver of MySQL logs.
type driverLog struct{}

// Print implements mysql.Logger.
func (driverLog) Print(v ...any) { _, _ = fmt.Fprintln(io.Writer(&logged), v...) }

package dbtest

import (
	"io"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// greet asks for the server's first bytes without a driver: MariaDB speaks first, PostgreSQL answers the request for TLS.
func greet(s *Server, limit time.Duration) error {
	c, err := net.DialTimeout("tcp", s.Addr, limit)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(limit))
	if s.kind == (postgreSQL{}) {
		if _, err := c.Write([]byte{0, 0, 0, 8, 4, 210, 22, 47}); err != nil {
			return err
		}
	}
	_, err = io.ReadFull(c, make([]byte, 1))
	return err
}

func TestServers(t *testing.T) {
	for name, open := range map[string]func(testing.TB, ...string) *Server{"mariadb": MariaDB, "postgresql": PostgreSQL} {
		t.Run(name, func(t *testing.T) {
			began := time.Now()
			s := open(t)
			t.Log("started in", time.Since(began))
			require.NoError(t, greet(s, 10*time.Second))

			require.NoError(t, s.Stop())
			require.Error(t, greet(s, 200*time.Millisecond), "a stopped server is silent")
			require.NoError(t, s.Continue())
			require.NoError(t, greet(s, 10*time.Second))

			first := s.Pid
			s.Kill()
			require.Error(t, greet(s, time.Second), "a killed server refuses")
			began = time.Now()
			require.NoError(t, s.Restart())
			t.Log("started again in", time.Since(began))
			require.NotEqual(t, first, s.Pid)
			require.NoError(t, greet(s, 10*time.Second))

			require.NoError(t, s.Stop())
			s.Close() // copes with a stopped server
			require.NoDirExists(t, s.dir)
			require.Empty(t, childrenOf(s.Pid))
			require.Error(t, exec.Command("kill", "-0", strconv.Itoa(s.Pid)).Run(), "no process is left")
		})
	}
}

// A MariaDB that starts removes all temporary tables in its tmpdir. If several servers shared one, a query of another would fail, or crash it.
func TestMariaDBHasItsOwnTemporaryTables(t *testing.T) {
	s := MariaDB(t)
	client, err := exec.LookPath("mariadb")
	require.NoError(t, err)
	out, err := exec.Command(client, "--no-defaults", "--host=127.0.0.1", "--port="+strconv.Itoa(s.Port), "--user=root", "--skip-column-names", "--execute=SELECT @@tmpdir").Output()
	require.NoError(t, err)
	require.Equal(t, s.dir, strings.TrimSpace(string(out)))
}

// TestKilledAndClosed: nothing is left in the directory for temporary files.
func TestKilledAndClosed(t *testing.T) {
	for name, open := range map[string]func(...string) (*Server, error){"mariadb": StartMariaDB, "postgresql": StartPostgreSQL} {
		t.Run(name, func(t *testing.T) {
			tmp, err := os.MkdirTemp("", "dbtest") // not t.TempDir, whose parents only root may enter
			require.NoError(t, err)
			require.NoError(t, os.Chmod(tmp, 0o755))
			t.Cleanup(func() { _ = os.RemoveAll(tmp) })
			t.Setenv("TMPDIR", tmp)
			s, err := open()
			need(t, err)
			s.Kill()
			s.Close()
			left, err := os.ReadDir(tmp)
			require.NoError(t, err)
			require.Empty(t, left)
		})
	}
}

// TestBadArgument: a server that ends at once is an error with its log, not a wait.
func TestBadArgument(t *testing.T) {
	for name, open := range map[string]func(...string) (*Server, error){"mariadb": StartMariaDB, "postgresql": StartPostgreSQL} {
		t.Run(name, func(t *testing.T) {
			s, err := open("--no-such-setting=1")
			if err == nil {
				s.Close()
			}
			require.ErrorContains(t, err, "such", "the log is in it")
		})
	}
}

package dbtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
)

type mariaDB struct{}

// settings makes the server small and fast: committed data outlives the process, but not the machine. Its temporary tables are in its own
// folder: a server that starts removes all of those in its tmpdir, and another server whose tables they were may crash.
func (mariaDB) settings(dir string) []string {
	args := []string{
		"--no-defaults", "--datadir=" + filepath.Join(dir, "data"), "--tmpdir=" + dir, "--skip-name-resolve",
		"--innodb-flush-log-at-trx-commit=2", "--innodb-flush-method=nosync", "--innodb-doublewrite=0",
		"--innodb-log-file-size=8M", "--innodb-buffer-pool-size=32M", "--innodb-buffer-pool-dump-at-shutdown=0",
		"--performance-schema=0", "--character-set-server=utf8mb4",
	}
	if os.Geteuid() == 0 {
		args = append(args, "--user=root") // it refuses to run as root otherwise
	}
	return args
}

func (k mariaDB) install(dir string) error {
	tool, err := program("mariadb-install-db", "mariadb-server")
	if err != nil {
		return err
	}
	args := append(k.settings(dir), "--auth-root-authentication-method=normal")
	if out, err := exec.Command(tool, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("dbtest: %s: %w\n%s", tool, err, out)
	}
	return nil
}

func (k mariaDB) command(dir string, port int) (*exec.Cmd, error) {
	server, err := program("mariadbd", "mariadb-server", "/usr/sbin", "/usr/libexec")
	if err != nil {
		return nil, err
	}
	return exec.Command(server, append(k.settings(dir),
		"--skip-networking=0", "--bind-address=127.0.0.1", "--port="+strconv.Itoa(port),
		"--socket="+filepath.Join(dir, "socket"), "--pid-file="+filepath.Join(dir, "pid"))...), nil
}

func (mariaDB) ready() string          { return "ready for connections" }
func (mariaDB) dsn(addr string) string { return "root:@tcp(" + addr + ")/test?timeout=10s" }
func (mariaDB) quit() syscall.Signal   { return syscall.SIGTERM }
func (mariaDB) swept(string)           {}

package dbtest

import (
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// postgreSQL refuses to run as root, so root runs it as another user.
type postgreSQL struct{}

const postgresPrograms = "/usr/lib/postgresql/*/bin"

func (k postgreSQL) install(dir string) error {
	initdb, err := program("initdb", "postgresql", postgresPrograms)
	if err != nil {
		return err
	}
	cmd := exec.Command(initdb, "-D", filepath.Join(dir, "data"), "-U", "postgres", "-A", "trust", "-E", "UTF8",
		"--no-locale", "--no-sync")
	if err := k.unprivileged(cmd, dir); err != nil {
		return err
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("dbtest: %s: %w\n%s", initdb, err, out)
	}
	return nil
}

func (k postgreSQL) command(dir string, port int) (*exec.Cmd, error) {
	server, err := program("postgres", "postgresql", postgresPrograms)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(server, "-D", filepath.Join(dir, "data"), "-h", "127.0.0.1", "-p", strconv.Itoa(port), "-k", dir,
		"-F", "-c", "shared_buffers=16MB", "-c", "full_page_writes=off", "-c", "max_connections=100")
	return cmd, k.unprivileged(cmd, dir)
}

// unprivileged makes the command run as another user if this process runs as root, in a directory that belongs to that user.
func (postgreSQL) unprivileged(cmd *exec.Cmd, dir string) error {
	cmd.Dir = dir
	if os.Geteuid() != 0 {
		return nil
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		if u, err = user.Lookup("nobody"); err != nil {
			return err
		}
	}
	return runAs(cmd, u, dir)
}

func (postgreSQL) ready() string { return "ready to accept connections" }

func (postgreSQL) dsn(addr string) string {
	return "postgres://postgres@" + addr + "/postgres?sslmode=disable"
}

func (postgreSQL) quit() syscall.Signal { return syscall.SIGQUIT }

// swept removes the shared memory segment that a killed server leaves. Its number is in the lock file.
func (postgreSQL) swept(dir string) {
	text, err := os.ReadFile(filepath.Join(dir, "data", "postmaster.pid"))
	if err != nil {
		return // the server was shut down cleanly
	}
	if lines := strings.Split(string(text), "\n"); len(lines) > 6 {
		if f := strings.Fields(lines[6]); len(f) == 2 {
			_ = exec.Command("ipcrm", "-m", f[1]).Run()
		}
	}
}

//go:build unix

package dbtest

import (
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"syscall"
)

// The signals that suspend and resume a process.
const (
	stopped   = syscall.SIGSTOP
	continued = syscall.SIGCONT
)

func kill(pid int, sig syscall.Signal) error { return syscall.Kill(pid, sig) }

// runAs makes the command run as another user, to whom it gives the directory.
func runAs(cmd *exec.Cmd, u *user.User, dir string) error {
	uid, err := strconv.ParseUint(u.Uid, 10, 32)
	if err != nil {
		return err
	}
	gid, err := strconv.ParseUint(u.Gid, 10, 32)
	if err != nil {
		return err
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}
	return os.Chown(dir, int(uid), int(gid))
}

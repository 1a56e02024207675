package dbtest

import (
	"errors"
	"os/exec"
	"os/user"
	"syscall"
)

// Windows has no signals that suspend and resume a process. These stand in their place, and cannot be sent.
const (
	stopped   = syscall.Signal(0x13)
	continued = syscall.Signal(0x12)
)

func kill(int, syscall.Signal) error { return errors.ErrUnsupported }

// runAs is not called: no process on Windows runs as root.
func runAs(*exec.Cmd, *user.User, string) error { return errors.ErrUnsupported }

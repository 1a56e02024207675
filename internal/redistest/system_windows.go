package redistest

import (
	"errors"
	"syscall"
)

// Stop returns an error, because Windows cannot suspend a process.
func (s *Server) Stop() error { return errors.ErrUnsupported }

// Continue ends Stop.
func (s *Server) Continue() error { return errors.ErrUnsupported }

// setBacklog sets how many connections the kernel accepts on behalf of a listening socket.
func setBacklog(socket uintptr, connections int) error {
	return syscall.Listen(syscall.Handle(socket), connections)
}

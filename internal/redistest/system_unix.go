//go:build unix

package redistest

import "syscall"

// Stop suspends the server (SIGSTOP) until Continue.
func (s *Server) Stop() error { return s.signal(syscall.SIGSTOP) }

// Continue ends Stop.
func (s *Server) Continue() error { return s.signal(syscall.SIGCONT) }

// setBacklog sets how many connections the kernel accepts on behalf of a listening socket.
func setBacklog(socket uintptr, connections int) error {
	return syscall.Listen(int(socket), connections)
}

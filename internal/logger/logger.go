// Package logger has the place where a limiter or a store logs, which users may change.
package logger

import (
	"log/slog"
	"runtime/debug"
	"sync/atomic"
)

// Logger is where something logs: slog.Default() as long as none was set. The zero value is ready, and safe for concurrent use.
type Logger struct{ atomic.Pointer[slog.Logger] }

// Set replaces the logger; nil changes nothing.
func (l *Logger) Set(to *slog.Logger) {
	if to != nil {
		l.Store(to)
	}
}

// Get returns the logger.
func (l *Logger) Get() *slog.Logger {
	if set := l.Load(); set != nil {
		return set
	}
	return slog.Default()
}

// Recovered ends and logs a panic of a user's code (a hook, an observer, a log handler) in a goroutine that no caller owns, where it would
// end the process. It must be deferred.
func (l *Logger) Recovered() {
	if value := recover(); value != nil {
		l.Panicked(value)
	}
}

// Panicked logs a panic. If the log handler panics as well, that panic is dropped.
func (l *Logger) Panicked(value any) {
	defer func() { _ = recover() }()
	l.Get().Error("tokenbucket: a hook of the client, an observer or a log handler panicked; the limiter goes on",
		"panic", value, "stack", string(debug.Stack()))
}

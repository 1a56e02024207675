package tokenbucket

import (
	"log/slog"
	"sync/atomic"
)

// logger is where something logs: slog.Default(), as long as none was set.
type logger struct{ atomic.Pointer[slog.Logger] }

// set does nothing for nil.
func (l *logger) set(to *slog.Logger) {
	if to != nil {
		l.Store(to)
	}
}

func (l *logger) get() *slog.Logger {
	if set := l.Load(); set != nil {
		return set
	}
	return slog.Default()
}

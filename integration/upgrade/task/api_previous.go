//go:build previous

package task

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

func waitShare(l *registry.Limit) float64 { return l.Cache }

// tableOf returns the options for the table of a task.
func tableOf(t *Task) []sqlsource.Option {
	if t.View == "" {
		return nil
	}
	return []sqlsource.Option{sqlsource.WithTable(t.View)}
}

func limitOf(t *Task) registry.Limit {
	return registry.Limit{Name: t.Name, Rate: t.Rate, MaxPermits: &t.Burst}
}

func semaphoreTimeout(d time.Duration) semaphore.Option { return semaphore.WithTimeout(d) }

func windowTimeout(d time.Duration) slidingwindow.Option { return slidingwindow.WithTimeout(d) }

// prioritized does nothing: that release has no priorities.
func prioritized(_ bool, opts []tokenbucket.Option) []tokenbucket.Option { return opts }

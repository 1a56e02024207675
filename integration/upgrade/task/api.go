//go:build !previous

package task

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

func waitShare(l *registry.Limit) float64 { return l.MaxWait.Seconds() }

// tableOf returns the options for the table of a task.
func tableOf(*Task) []sqlsource.Option { return nil }

func limitOf(t *Task) registry.Limit {
	return registry.Limit{Name: t.Name, Rate: t.Rate, Burst: &t.Burst}
}

func semaphoreTimeout(d time.Duration) semaphore.Option { return semaphore.WithStoreTimeout(d) }

func windowTimeout(d time.Duration) slidingwindow.Option { return slidingwindow.WithStoreTimeout(d) }

// prioritized gives a limiter the lowest priority, or leaves it as it is.
func prioritized(lowest bool, opts []tokenbucket.Option) []tokenbucket.Option {
	if lowest {
		return append(opts, tokenbucket.WithPriority(tokenbucket.Lowest))
	}
	return opts
}

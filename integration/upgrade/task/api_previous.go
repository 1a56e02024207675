//go:build previous

package task

import (
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/semaphore"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

func waitShare(l *registry.Limit) float64 { return l.Cache }

func semaphoreTimeout(d time.Duration) semaphore.Option { return semaphore.WithTimeout(d) }

func windowTimeout(d time.Duration) slidingwindow.Option { return slidingwindow.WithTimeout(d) }

// prioritized does nothing: that release has no priorities.
func prioritized(_ bool, opts []tokenbucket.Option) []tokenbucket.Option { return opts }

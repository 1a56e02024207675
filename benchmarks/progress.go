package main

import (
	"fmt"
	"io"
	"time"
)

// progress prints a line for each workload, and one every few seconds within it.
type progress struct {
	out   io.Writer
	began time.Time
	last  time.Time
}

func (p *progress) begin(format string, args ...any) {
	p.began = time.Now()
	p.last = p.began
	fmt.Fprintf(p.out, format+"\n", args...)
}

func (p *progress) step(format string, args ...any) {
	const every = 3 * time.Second
	if now := time.Now(); now.Sub(p.last) >= every {
		p.last = now
		fmt.Fprintf(p.out, "  %4.0f s   %s\n", now.Sub(p.began).Seconds(), fmt.Sprintf(format, args...))
	}
}

func (p *progress) end(o *outcome) {
	missed := 0
	for i := range o.targets {
		if !o.targets[i].reached() {
			missed++
		}
	}
	fmt.Fprintf(p.out, "  %4.1f s   %d of %d targets reached\n", time.Since(p.began).Seconds(), len(o.targets)-missed, len(o.targets))
	for _, err := range o.broken {
		fmt.Fprintf(p.out, "  VIOLATED: %v\n", err)
	}
}

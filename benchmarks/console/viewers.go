package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
)

// viewers measures the share of a core that a gateway uses without viewers of its console, and with many. A few calls arrive all the time.
func viewers(ctx context.Context, l *lab, o *options, many int) error {
	g, err := l.start("viewers", o.limits)
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		for n := 0; ctx.Err() == nil; n++ {
			if res, err := http.Get(fmt.Sprintf("%s/service-%d/call-%05d", g.url, n%10%17, n%10)); err == nil {
				_ = res.Body.Close()
			}
			time.Sleep(50 * time.Millisecond)
		}
	}()
	t := table.NewWriter()
	t.SetOutputMirror(os.Stdout)
	t.AppendHeader(table.Row{fmt.Sprintf("viewers of a gateway with %d limits and 20 calls a second", o.limits), "% of a core, over " + o.watch.String()})
	for _, n := range []int{0, 1, many - 1} {
		for range n {
			if err := read(ctx, g.admin+"/console/stream"); err != nil {
				return err
			}
		}
		time.Sleep(2 * time.Second)
		before, err := g.processor()
		if err != nil {
			return err
		}
		began := time.Now()
		time.Sleep(o.watch)
		after, err := g.processor()
		if err != nil {
			return err
		}
		t.AppendRow(table.Row{map[int]int{0: 0, 1: 1, many - 1: many}[n], fmt.Sprintf("%.2f", 100*(after-before).Seconds()/time.Since(began).Seconds())})
	}
	t.Render()
	return nil
}

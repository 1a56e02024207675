package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"time"

	"github.com/jedib0t/go-pretty/v6/table"
	"github.com/redis/go-redis/v9"
)

// looked is the result of one request for a page.
type looked struct {
	first, whole time.Duration // time to the first byte and to the last
	bytes        int
	commands     int // number of commands that Redis received in that time
}

var processed = regexp.MustCompile(`total_commands_processed:(\d+)`)

func look(ctx context.Context, client *redis.Client, url string) (l looked, err error) {
	commands := func() int {
		if m := processed.FindStringSubmatch(client.Info(ctx, "stats").Val()); m != nil {
			n, _ := strconv.Atoi(m[1])
			return n
		}
		return 0
	}
	before := commands()
	began := time.Now()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return l, err
	}
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		return l, err
	}
	defer func() { _ = res.Body.Close() }()
	l.first = time.Since(began)
	text, err := io.ReadAll(res.Body)
	l.whole, l.bytes, l.commands = time.Since(began), len(text), commands()-before-1
	if err == nil && res.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, res.Status)
	}
	return l, err
}

// firstPage measures the page of a number of limits: for the first viewer, and for a later one.
func firstPage(ctx context.Context, l *lab, limits int) error {
	client := redis.NewClient(&redis.Options{Addr: l.redis})
	defer func() { _ = client.Close() }()
	t := table.NewWriter()
	t.SetOutputMirror(os.Stdout)
	t.SetTitle("the first page of %d limits", limits)
	t.AppendHeader(table.Row{"", "first byte", "whole page", "bytes", "commands of Redis meanwhile"})
	row := func(name string, o looked) {
		t.AppendRow(table.Row{name, o.first.Round(100 * time.Microsecond), o.whole.Round(100 * time.Microsecond), o.bytes, o.commands})
	}
	const cold, warm = 5, 50
	var last *gateway
	for i := range cold {
		g, err := l.start(fmt.Sprint("page", i), limits)
		if err != nil {
			return err
		}
		time.Sleep(5 * time.Second) // the gateway has published its limits
		o, err := look(ctx, client, g.admin+"/console/")
		if err != nil {
			return err
		}
		row(fmt.Sprintf("nobody has looked before, %d", i+1), o)
		if last = g; i < cold-1 {
			_ = g.command.Process.Kill()
		}
	}
	var whole, first []float64
	var o looked
	for range warm {
		var err error
		if o, err = look(ctx, client, last.admin+"/console/"); err != nil {
			return err
		}
		whole, first = append(whole, float64(o.whole)), append(first, float64(o.first))
		time.Sleep(100 * time.Millisecond)
	}
	o.first, o.whole = time.Duration(quantile(first, 0.5)), time.Duration(quantile(whole, 0.5))
	row(fmt.Sprintf("somebody looks, median of %d", warm), o)
	o.first, o.whole = time.Duration(quantile(first, 0.99)), time.Duration(quantile(whole, 0.99))
	row("somebody looks, the slowest", o)
	t.Render()
	return nil
}

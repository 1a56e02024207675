package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// lab runs an upstream, and starts gateways.
type lab struct {
	program, dir, redis, upstream string
	closers                       []func()
}

func (l *lab) close() {
	for i := len(l.closers) - 1; i >= 0; i-- {
		l.closers[i]()
	}
}

func (l *lab) startUpstream() error {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }()
	l.upstream = "http://" + listener.Addr().String()
	l.closers = append(l.closers, func() { _ = server.Close() })
	return nil
}

// gateway is a gateway process.
type gateway struct {
	url, admin string
	command    *exec.Cmd
}

var listening = regexp.MustCompile(`msg=listening for=(\w+) address=(\S+)`)

// start starts a gateway with a number of limits. That of /full grants all calls.
func (l *lab) start(name string, limits int) (*gateway, error) {
	var rows strings.Builder
	rows.WriteString("limits:\n  - name: /full\n    rate: 1000000\n    cache: 0\n")
	for i := 1; i < limits; i++ {
		fmt.Fprintf(&rows, "  - name: /service-%d/call-%05d\n    rate: %d\n", i%17, i, 1+i%50)
	}
	file := filepath.Join(l.dir, name+".yaml")
	if err := os.WriteFile(file, []byte(rows.String()), 0o600); err != nil {
		return nil, err
	}
	g := &gateway{command: exec.Command(l.program, "gateway", "--upstream", l.upstream, "--limits", "file://"+file, "--redis", l.redis,
		"--key-prefix", name+":", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")}
	out, err := g.command.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := g.command.Start(); err != nil {
		return nil, err
	}
	l.closers = append(l.closers, func() {
		_ = g.command.Process.Signal(syscall.SIGTERM)
		_ = g.command.Wait()
	})
	lines := bufio.NewScanner(out)
	var said []string
	for lines.Scan() {
		said = append(said, lines.Text())
		if m := listening.FindStringSubmatch(lines.Text()); m != nil && m[1] == "admin" {
			g.admin = "http://" + m[2]
		} else if m != nil {
			g.url = "http://" + m[2]
		}
		if strings.Contains(lines.Text(), "msg=ready") {
			go func() {
				for lines.Scan() { // until the process ends
				}
			}()
			return g, nil
		}
	}
	return nil, fmt.Errorf("the gateway has ended: %v: %s", g.command.Wait(), strings.Join(said, "\n"))
}

// processor returns the processor time that a gateway has used.
func (g *gateway) processor() (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", g.command.Process.Pid))
	if err != nil {
		return 0, err
	}
	_, after, _ := strings.Cut(string(text), ") ") // the name may contain blanks
	f := strings.Fields(after)
	if len(f) < 13 {
		return 0, errors.New("/proc/…/stat is short")
	}
	var ticks int64
	for _, s := range f[11:13] { // utime, stime
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			return 0, err
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond, nil // USER_HZ is 100
}

// read follows a stream of a console until ctx ends. It returns when the first event has arrived.
func read(ctx context.Context, url string) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		_ = res.Body.Close()
		return fmt.Errorf("%s: %s", url, res.Status)
	}
	first := make(chan struct{})
	go func() {
		defer func() { _ = res.Body.Close() }()
		buffer, seen := make([]byte, 64<<10), false
		for {
			n, err := res.Body.Read(buffer)
			if !seen && strings.Contains(string(buffer[:n]), "event: ") {
				seen = true
				close(first)
			}
			if err != nil {
				return
			}
		}
	}()
	select {
	case <-first:
		return nil
	case <-time.After(10 * time.Second):
		return errors.New(url + ": no event in ten seconds")
	}
}

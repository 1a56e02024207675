package main

import (
	"fmt"
	"os"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// machine is what the numbers depend on, each with its name.
type machine [][2]string

// measuredModules are the rivals, and what all of them stand on.
var measuredModules = []string{
	"github.com/redis/go-redis/v9", "github.com/go-redis/redis_rate/v10", "github.com/throttled/throttled/v2",
	"github.com/ulule/limiter/v3", "github.com/sethvargo/go-redisstore", "github.com/gomodule/redigo",
	"golang.org/x/time", "go.uber.org/ratelimit",
}

func (b *bench) machine() (machine, error) {
	info, err := b.clients.plain.Info(b.ctx, "server").Result()
	if err != nil {
		return nil, err
	}
	m := machine{
		{"CPU", firstMatch("/proc/cpuinfo", `(?m)^model name\s*:\s*(.*)$`)},
		{"cores", fmt.Sprintf("%d (GOMAXPROCS %d)", runtime.NumCPU(), runtime.GOMAXPROCS(0))},
		{"OS", fmt.Sprintf("%s, kernel %s, %s/%s", firstMatch("/etc/os-release", `(?m)^PRETTY_NAME="?([^"\n]*)`),
			firstMatch("/proc/sys/kernel/osrelease", `^(\d+\.\d+)`), runtime.GOOS, runtime.GOARCH)},
		{"Go", runtime.Version()},
		{"redis-server", submatch(info, `(?m)^redis_version:(\S+)`) + ", on the same machine, without persistence"},
		{"command", strings.TrimSpace("go run ./benchmarks " + strings.Join(b.args, " "))},
		{"date", time.Now().UTC().Format("2006-01-02 15:04 MST")},
	}
	return append(m, versions()...), nil
}

// versions of the rivals, as built in.
func versions() machine {
	build, ok := debug.ReadBuildInfo()
	if !ok {
		return nil
	}
	var m machine
	for _, d := range build.Deps {
		if slices.Contains(measuredModules, d.Path) {
			m = append(m, [2]string{d.Path, d.Version})
		}
	}
	return m
}

func firstMatch(file, expression string) string {
	text, err := os.ReadFile(file)
	if err != nil {
		return "unknown"
	}
	return submatch(string(text), expression)
}

func submatch(s, expression string) string {
	if m := regexp.MustCompile(expression).FindStringSubmatch(s); m != nil {
		return strings.TrimSpace(m[1])
	}
	return "unknown"
}

// Package machine describes the machine and the software on which measurements depend.
package machine

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

// Facts are pairs of a name and a fact about the machine or the program.
type Facts [][2]string

// Read returns the facts. info is the INFO of the redis-server, command is the command line, and modules are the modules whose versions to
// list.
func Read(info, command string, modules ...string) Facts {
	m := Facts{
		{"CPU", firstMatch("/proc/cpuinfo", `(?m)^model name\s*:\s*(.*)$`)},
		{"cores", fmt.Sprintf("%d (GOMAXPROCS %d)", runtime.NumCPU(), runtime.GOMAXPROCS(0))},
		{"OS", fmt.Sprintf("%s, kernel %s, %s/%s", firstMatch("/etc/os-release", `(?m)^PRETTY_NAME="?([^"\n]*)`),
			firstMatch("/proc/sys/kernel/osrelease", `^(\d+\.\d+)`), runtime.GOOS, runtime.GOARCH)},
		{"Go", runtime.Version()},
		{"redis-server", submatch(info, `(?m)^redis_version:(\S+)`) + ", on the same machine, without persistence"},
		{"command", strings.TrimSpace(command)},
		{"date", time.Now().UTC().Format("2006-01-02 15:04 MST")},
	}
	if build, ok := debug.ReadBuildInfo(); ok {
		for _, d := range build.Deps {
			if slices.Contains(modules, d.Path) {
				m = append(m, [2]string{d.Path, d.Version})
			}
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

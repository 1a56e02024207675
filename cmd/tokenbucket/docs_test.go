package main

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// The commands of docs/gateway.md run as they stand there, but on free ports, and leave nothing behind.
func TestDocumentedCommands(t *testing.T) {
	t.Parallel()
	for _, tool := range []string{"bash", "sqlite3", "python3", "redis-server", "curl"} {
		redistest.Program(t, tool)
	}
	text, err := os.ReadFile("../../docs/gateway.md")
	require.NoError(t, err)
	var script strings.Builder
	for _, block := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(string(text), -1) {
		script.WriteString(block[1])
	}
	commands := script.String()
	require.Contains(t, commands, "kill ")
	var upstream string
	for _, port := range []string{"8080", "8081", "9000", "6379"} {
		_, free, err := net.SplitHostPort(redistest.FreeAddr())
		require.NoError(t, err)
		commands = regexp.MustCompile(`\b`+port+`\b`).ReplaceAllString(commands, free)
		switch port {
		case "8080":
			commands = strings.Replace(commands, "create-table: true\n", "create-table: true\nlisten: 127.0.0.1:"+free+"\n", 1)
		case "9000":
			upstream = free
		case "8081":
			commands = strings.Replace(commands, "create-table: true\n", "create-table: true\nadmin: 127.0.0.1:"+free+"\n", 1)
		}
	}
	commands = regexp.MustCompile(`sleep ([12]\S*)`).ReplaceAllString(commands, "sleep 3") // the machine may be busy
	commands = strings.Replace(commands, "sleep 3", "until curl -s -o /dev/null localhost:"+upstream+"; do sleep 0.2; done; sleep 3", 1)
	const slow = "('/ibe/AvailFare', 0.1, 0)" // as slow as the machine may be, it makes more calls than that
	require.Contains(t, commands, "('/ibe/AvailFare', 5, 0)")
	commands = strings.Replace(commands, "('/ibe/AvailFare', 5, 0)", slow, 1)
	tmp := t.TempDir()
	cmd := exec.Command("bash", "-u", "-o", "pipefail", "-c", commands)
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "TMPDIR="+tmp, "NO_PROXY=*")
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	require.NoError(t, err)
	lines := strings.Split(string(out), "\n")
	answers := regexp.MustCompile(`^((200|429) ){20}$`)
	var limited []int
	for _, line := range lines {
		if answers.MatchString(line) {
			limited = append(limited, strings.Count(line, "429"))
		}
	}
	require.Len(t, limited, 2)
	require.Greater(t, limited[0], limited[1])
	require.Contains(t, string(out), `"rate_in_force": 15`)
	require.Contains(t, string(out), `tokenbucket_decisions_total{bucket="/ibe/AvailFare",by="store",outcome="granted",priority="",shadow="false"}`)
	require.Contains(t, string(out), "redis: ok")
	left, err := filepath.Glob(filepath.Join(tmp, "tmp.*"))
	require.NoError(t, err)
	require.Empty(t, left)
	status, err := exec.Command("git", "-C", "../..", "status", "--porcelain", "--ignored", "--", "tokenbucket", "gateway.yaml", "limits.db", "ibe").Output()
	require.NoError(t, err)
	require.Empty(t, string(status))
}

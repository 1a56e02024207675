// Report runs the tests of the faults and writes what they measured as a table, docs/faults.md:
//
//	go run ./integration/faults/report
//
// That is the full tier, 25 minutes. With -short it runs the short form; arguments are packages to run, in place of all. Either goes
// to the standard output, unless -o names a file. All tests have the same seed: that of TOKENBUCKET_SEED, or one that is chosen.
package main

import (
	"cmp"
	"flag"
	"fmt"
	"log"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"
)

const module = "github.com/go-tokenbucket/tokenbucket/integration"

func main() {
	log.SetFlags(0)
	short := flag.Bool("short", false, "run the short form, without TOKENBUCKET_LONG=1")
	to := flag.String("o", "", "`file` to write; default docs/faults.md of this repository, or the standard output if not all is run")
	flag.Parse()
	if err := run(*short, *to, flag.Args()); err != nil {
		log.Fatal("report: ", err)
	}
}

func run(short bool, to string, named []string) error {
	dir, err := output("go", "list", "-m", "-f", "{{.Dir}}", module)
	if err != nil {
		return err
	}
	all, packages := !short && len(named) == 0, named
	if len(named) == 0 {
		packages = []string{module + "/faults/..."}
	}
	commit, err := output("git", "-C", dir, "describe", "--always", "--dirty", "--exclude=*")
	if err != nil {
		return err
	}
	args := append([]string{"test", "-json", "-count=1", "-p=1", "-timeout=55m"}, packages...)
	h := header{
		Command: "go run ./integration/faults/report", Commit: commit, When: time.Now().UTC().Format("2006-01-02 15:04 MST"),
		Machine: machine(), Seed: cmp.Or(os.Getenv("TOKENBUCKET_SEED"), strconv.FormatUint(rand.Uint64(), 10)),
	}
	cmd := exec.Command("go", args...)
	cmd.Env = append(os.Environ(), "TOKENBUCKET_SEED="+h.Seed, "TOKENBUCKET_LONG=1")
	if short {
		cmd.Env = append(cmd.Env, "TOKENBUCKET_LONG=")
		h.Command += " -short"
	}
	if len(named) > 0 {
		h.Command += " " + strings.Join(named, " ")
	}
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	began := time.Now()
	if err := cmd.Start(); err != nil {
		return err
	}
	r := newResults()
	if err := r.read(out, os.Stderr); err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return err
	}
	failed := cmd.Wait() // the report is written in any case, with the tests that failed
	h.Took = time.Since(began).Round(time.Second)
	if to == "" && all {
		to = filepath.Join(dir, "..", "docs", "faults.md")
	}
	var table strings.Builder
	r.write(&table, h)
	if to == "" {
		fmt.Print(table.String())
	} else if err := os.WriteFile(to, []byte(table.String()), 0o644); err != nil {
		return err
	}
	if failed != nil {
		return fmt.Errorf("go %s: %w", strings.Join(args, " "), failed)
	}
	return nil
}

func output(name string, args ...string) (string, error) {
	out, err := exec.Command(name, args...).Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}

// numbered is a kernel and its release, without what its builder calls it.
var numbered = regexp.MustCompile(`^\S+ \d+\.\d+`)

// machine is what figures depend on, as far as it can be found out.
func machine() string {
	parts := []string{fmt.Sprintf("%d processors", runtime.NumCPU())}
	if text, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(text)) {
			if name, value, _ := strings.Cut(line, ":"); strings.TrimSpace(name) == "model name" {
				parts[0] += " (" + strings.TrimSpace(value) + ")"
				break
			}
		}
	}
	if kernel, err := output("uname", "-sr"); err == nil {
		parts = append(parts, numbered.FindString(kernel))
	}
	parts = append(parts, runtime.Version()+" "+runtime.GOOS+"/"+runtime.GOARCH)
	if version, err := output("redis-server", "--version"); err == nil {
		if fields := strings.Fields(version); len(fields) > 2 {
			parts = append(parts, "redis-server "+strings.TrimPrefix(fields[2], "v="))
		}
	}
	return strings.Join(parts, ", ")
}

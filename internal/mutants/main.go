// Command mutants plants bugs in a copy of the repository, one at a time, and names the test of tier 1 that finds each. Run it in
// the root of the repository:
//
//	go run ./internal/mutants [-all] [-run regexp] [area...]
//
// The bugs are in mutants.txt beside this file: a line "== area packages...", what goes wrong, and a change: lines that begin
// with - are replaced by those that begin with +. They are looked for in all source files of the root module, whatever their
// indentation, and must occur there once. Without -all, only the packages that are named are tested, and with -run only some of
// their tests. Before that they must pass without a bug. A package is tested as far as its first failure.
package main

import (
	"bytes"
	"cmp"
	"context"
	_ "embed"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// planted is the environment variable by which tests learn that a bug may be planted.
const planted = "TOKENBUCKET_MUTANT"

//go:embed mutants.txt
var text string

// mutant is a bug.
type mutant struct {
	area     string
	packages []string
	about    string
	old, new []string // lines, without indentation
}

func main() {
	all := flag.Bool("all", false, "run the whole of tier 1, go test ./..., for every bug")
	tests := flag.String("run", "", "run only the tests that match")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *all, *tests, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, all bool, tests string, areas []string) error {
	mutants, err := parse(text)
	if err != nil {
		return err
	}
	if len(areas) > 0 {
		mutants = slices.DeleteFunc(mutants, func(m mutant) bool { return !slices.Contains(areas, m.area) })
	}
	if len(mutants) == 0 {
		return fmt.Errorf("mutants: there is none of %v", areas)
	}
	dir, err := os.MkdirTemp("", "mutants")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	sources, err := copyTree(dir)
	if err != nil {
		return err
	}

	tested := []string{"./..."}
	if !all {
		tested = nil
		for _, m := range mutants {
			tested = append(tested, m.packages...)
		}
		slices.Sort(tested)
		tested = slices.Compact(tested)
	}
	began := time.Now()
	if out, err := test(ctx, dir, tests, tested); err != nil {
		return fmt.Errorf("mutants: the tests fail without a bug: %w\n%s", err, out)
	}
	fmt.Printf("without a bug: green, %.0f s\n", time.Since(began).Seconds())

	var survived []string
	for _, m := range mutants {
		if !all {
			tested = m.packages
		}
		found, err := try(ctx, dir, sources, m, tests, tested)
		if err != nil {
			return fmt.Errorf("mutants: %s: %w", m.area, err)
		}
		if found == "" {
			found = "SURVIVED"
			survived = append(survived, m.area)
		}
		fmt.Printf("%s: %s\n    %s\n", m.area, m.about, found)
	}
	fmt.Printf("%d of %d bugs were found\n", len(mutants)-len(survived), len(mutants))
	if len(survived) > 0 {
		return fmt.Errorf("mutants: not found: %v", survived)
	}
	return nil
}

// try plants one bug, runs the tests, and takes it out again. It returns the file and the tests that found the bug, or "" if none did.
func try(ctx context.Context, dir string, sources []string, m mutant, tests string, packages []string) (found string, err error) {
	file, before, after, err := plant(dir, sources, m)
	if err != nil {
		return "", err
	}
	if err := os.WriteFile(filepath.Join(dir, file), after, 0o644); err != nil {
		return "", err
	}
	defer func() { err = cmp.Or(err, os.WriteFile(filepath.Join(dir, file), before, 0o644)) }()
	began := time.Now()
	out, err := test(ctx, dir, tests, packages)
	if err == nil || ctx.Err() != nil {
		return "", ctx.Err()
	}
	if broken := regexp.MustCompile(`(?m)^FAIL\s.*\[(build|setup) failed\]$`).FindString(out); broken != "" {
		return "", fmt.Errorf("it does not compile with the bug:\n%s", out)
	}
	names := findings(out)
	if len(names) == 0 {
		return "", fmt.Errorf("%w, but no test has failed:\n%s", err, out)
	}
	return fmt.Sprintf("%s: found by %s, %.0f s", file, strings.Join(names, ", "), time.Since(began).Seconds()), nil
}

// failed are the lines that name a test which failed, or still ran when the time was over, and panics.
var failed = regexp.MustCompile(`(?m)^--- FAIL: (\S+)|^\t\t(Test\w+)\S* \(|^(panic: .*|fatal error: .*|goleak: .*)$`)

// findings are the tests that failed, and panics.
func findings(out string) (names []string) {
	for _, match := range failed.FindAllStringSubmatch(out, -1) {
		if name := cmp.Or(match[1:]...); name != "" && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return names
}

// test runs tests, and stops at the first failure of each package.
func test(ctx context.Context, dir, tests string, packages []string) (out string, err error) {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-failfast", "-timeout", "5m", "-run", tests}, packages...)...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), planted+"=1")
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	combined, err := cmd.CombinedOutput()
	return string(combined), cmp.Or(ctx.Err(), err)
}

// copyTree copies the files of the repository as they are now, and returns the sources of the root module.
func copyTree(dir string) (sources []string, err error) {
	out, err := exec.Command("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		return nil, fmt.Errorf("mutants: git ls-files: %w", err)
	}
	files := strings.Split(strings.TrimSuffix(string(out), "\x00"), "\x00")
	var nested []string
	for _, file := range files {
		if filepath.Base(file) == "go.mod" && file != "go.mod" {
			nested = append(nested, filepath.Dir(file)+"/")
		}
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if os.IsNotExist(err) {
			continue // removed, and not committed yet
		} else if err != nil {
			return nil, err
		}
		to := filepath.Join(dir, file)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return nil, err
		}
		if err := os.WriteFile(to, content, 0o644); err != nil {
			return nil, err
		}
		ext := filepath.Ext(file)
		elsewhere := slices.ContainsFunc(nested, func(module string) bool { return strings.HasPrefix(file, module) })
		if (ext == ".go" || ext == ".lua") && !strings.HasSuffix(file, "_test.go") && !elsewhere {
			sources = append(sources, file)
		}
	}
	return sources, nil
}

// plant finds the place of a bug, and returns its file as it is, and with the bug.
func plant(dir string, sources []string, m mutant) (file string, before, after []byte, err error) {
	places := 0
	for _, source := range sources {
		content, err := os.ReadFile(filepath.Join(dir, source))
		if err != nil {
			return "", nil, nil, err
		}
		lines := bytes.Split(content, []byte("\n"))
		for i := range lines {
			if i+len(m.old) > len(lines) || !same(lines[i:i+len(m.old)], m.old) {
				continue
			}
			places++
			file, before, after = source, content, replace(lines, i, m)
		}
	}
	if places != 1 {
		return "", nil, nil, fmt.Errorf("these lines are in %d places, not in one; correct mutants.txt:\n%s", places, strings.Join(m.old, "\n"))
	}
	return file, before, after, nil
}

func same(lines [][]byte, want []string) bool {
	return slices.EqualFunc(lines, want, func(line []byte, w string) bool { return string(bytes.TrimSpace(line)) == w })
}

// replace puts the new lines at the place of the old ones.
func replace(lines [][]byte, at int, m mutant) []byte {
	first := lines[at]
	indent := first[:len(first)-len(bytes.TrimLeft(first, " \t"))]
	changed := slices.Clone(lines[:at])
	for _, line := range m.new {
		changed = append(changed, append(slices.Clone(indent), line...))
	}
	return bytes.Join(append(changed, lines[at+len(m.old):]...), []byte("\n"))
}

func parse(text string) ([]mutant, error) {
	var mutants []mutant
	for _, line := range strings.Split(text, "\n") {
		if rest, ok := strings.CutPrefix(line, "== "); ok {
			words := strings.Fields(rest)
			if len(words) < 2 {
				return nil, fmt.Errorf("mutants.txt: no packages: %s", line)
			}
			mutants = append(mutants, mutant{area: words[0], packages: words[1:]})
			continue
		}
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		if len(mutants) == 0 {
			return nil, fmt.Errorf("mutants.txt: before the first area: %s", line)
		}
		m := &mutants[len(mutants)-1]
		switch line[0] {
		case '-':
			m.old = append(m.old, strings.TrimSpace(line[1:]))
		case '+':
			m.new = append(m.new, strings.TrimSpace(line[1:]))
		default:
			m.about = line
		}
	}
	for _, m := range mutants {
		if len(m.old) == 0 || m.about == "" {
			return nil, fmt.Errorf("mutants.txt: %s: no change, or nothing is said of it", m.area)
		}
	}
	return mutants, nil
}

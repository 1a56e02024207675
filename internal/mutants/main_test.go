package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Every bug can be planted: a change of a line that a bug replaces fails here at once.
func TestEveryBugHasItsPlace(t *testing.T) {
	if os.Getenv(planted) != "" {
		t.Skip("a bug is planted: it must be found by what it does")
	}
	mutants, err := parse(text)
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join("..", "..")
	var sources []string
	for _, pattern := range []string{"*.go", "*/*.go", "internal/*/*.go", "registry/*/*.go", "registry/internal/*/*.go", "internal/*/lua/*.lua"} {
		files, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if !strings.HasSuffix(file, "_test.go") {
				file, _ = filepath.Rel(root, file)
				sources = append(sources, file)
			}
		}
	}
	areas := map[string]bool{}
	for _, m := range mutants {
		areas[m.area] = true
		file, before, after, err := plant(root, sources, m)
		if err != nil {
			t.Errorf("%s: %v", m.area, err)
		} else if string(before) == string(after) {
			t.Errorf("%s: %s is the same with the bug", m.area, file)
		}
	}
	for _, area := range strings.Fields("arithmetic script lock queue-order cancel lease refusal outage codec registry") {
		if !areas[area] {
			t.Errorf("no bug is planted in %s", area)
		}
	}
}

func TestPlant(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "a.go"), []byte("x\n\tif a {\n\t\tb()\n\t}\ny\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	m := mutant{old: []string{"if a {", "b()"}, new: []string{"if !a {"}}
	_, _, after, err := plant(dir, []string{"a.go"}, m)
	if want := "x\n\tif !a {\n\t}\ny\n"; err != nil || string(after) != want {
		t.Errorf("%q, %v, want %q", after, err, want)
	}
	m.old = []string{"if a {", "c()"}
	if _, _, _, err := plant(dir, []string{"a.go"}, m); err == nil {
		t.Error("planted where it does not fit")
	}
	m.old = []string{"b()"}
	if _, _, _, err := plant(dir, []string{"a.go", "a.go"}, m); err == nil {
		t.Error("planted in one of two places")
	}
}

func TestFindings(t *testing.T) {
	out := "--- FAIL: TestA (0.1s)\n    --- FAIL: TestA/sub (0.1s)\npanic: test timed out after 5m0s\n\trunning tests:\n\t\tTestB (5m0s)\nFAIL\tp\t1s\n"
	if got := strings.Join(findings(out), "|"); got != "TestA|panic: test timed out after 5m0s|TestB" {
		t.Error(got)
	}
	if got := findings("ok  \tp\t1s\nFAIL\n"); got != nil {
		t.Error(got)
	}
}

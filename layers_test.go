package tokenbucket_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	tb "github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/structure"
)

// layers are the files of this package from the bottom to the top. A file may use what stands in its own layer and below.
var layers = []struct{ name, files string }{
	{"seam and state", "store.go hook.go permit_state.go permit_batch.go config.go codec.go errors.go logger.go level.go permit_change.go smooth_bursty.go smooth_warmup.go"},
	{"stores", "traits.go memory_store.go redis_store.go redis_lock.go redis_script.go redis_trips.go redis_predict.go redis_exchange.go"},
	{"engine", "observer.go policy.go limiter.go call.go target.go coordinator.go waiters.go build.go deliver.go timeouts.go lease.go snapshot.go health.go failure.go"},
	{"API", "new.go bucket.go ask.go options.go reservation.go fallback.go shadow.go doc.go"},
}

func TestLayers(t *testing.T) {
	if tb.Raced {
		t.Skip("one goroutine has no race")
	}
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip("needs the go command: ", err)
	}
	packages, err := structure.Load(".", ".")
	if err != nil {
		t.Fatal(err)
	}
	root := packages[0]
	layer := map[string]int{}
	for i, l := range layers {
		for _, file := range strings.Fields(l.files) {
			if layer[file] != 0 {
				t.Errorf("%s stands in two layers", file)
			}
			layer[file] = i + 1
		}
	}
	for _, f := range root.Files {
		if layer[f.Name] == 0 {
			t.Errorf("%s stands in no layer: give it one in layers_test.go", f.Name)
		}
	}
	for file := range layer {
		if !slices.ContainsFunc(root.Files, func(f structure.File) bool { return f.Name == file }) {
			t.Errorf("%s has a layer, but is no file of this package: strike it from layers_test.go", file)
		}
	}
	if t.Failed() {
		return
	}

	for a, used := range root.Arrows() {
		if from, to := layer[a.From], layer[a.To]; from < to {
			t.Errorf("%s (%s) must not use %s (%s), but does: %s", a.From, layers[from-1].name, a.To, layers[to-1].name, strings.Join(used, " "))
		}
	}
}

// What docs/architecture.md names in backquotes is there: files, folders, and what files declare. "`name` in `file.go`" says
// where. A layer's row has its files.
func TestArchitecture(t *testing.T) {
	if tb.Raced {
		t.Skip("one goroutine has no race")
	}
	text, err := os.ReadFile("docs/architecture.md")
	require.NoError(t, err)
	page := string(text)
	require.LessOrEqual(t, strings.Count(page, "\n"), 150, "lines")
	for _, l := range layers {
		_, row, _ := strings.Cut(page, "\n| "+l.name+" |")
		row, _, _ = strings.Cut(row, "\n")
		for _, file := range strings.Fields(l.files) {
			require.Contains(t, row, "`"+file+"`", "the row of layer %q", l.name)
		}
	}

	in, anywhere := map[string]map[string]bool{}, map[string]bool{}
	require.NoError(t, filepath.WalkDir(".", func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".go") {
			in[path] = declared(t, path)
			for name := range in[path] {
				anywhere[name] = true
			}
		}
		return err
	}))
	quoted := regexp.MustCompile("`([\\w./]+)`(?: in `([\\w/]+\\.go)`)?")
	for _, m := range quoted.FindAllStringSubmatch(page, -1) {
		if name, file := m[1], m[2]; file != "" {
			require.True(t, in[file][name], "%s declares no %s", file, name)
		} else if !anywhere[name] {
			_, err := os.Stat(name)
			require.NoError(t, err, "nothing is called %s", name)
		}
	}
}

// declared are the names that a file declares: functions, types, variables and constants; methods and fields as name and as Type.name.
func declared(t *testing.T, file string) map[string]bool {
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	require.NoError(t, err)
	names := map[string]bool{}
	ast.Inspect(parsed, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			names[n.Name.Name] = true
			if n.Recv != nil {
				of, _, _ := strings.Cut(types.ExprString(n.Recv.List[0].Type), "[")
				names[strings.TrimPrefix(of, "*")+"."+n.Name.Name] = true
			}
			return false
		case *ast.ValueSpec:
			for _, name := range n.Names {
				names[name.Name] = true
			}
		case *ast.TypeSpec:
			names[n.Name.Name] = true
			ast.Inspect(n.Type, func(m ast.Node) bool {
				if f, ok := m.(*ast.Field); ok {
					for _, name := range f.Names {
						names[name.Name], names[n.Name.Name+"."+name.Name] = true, true
					}
				}
				return true
			})
		}
		return true
	})
	return names
}

package tokenbucket_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// Every name in backquotes in the pages about architecture exists: a file, a folder, or something that a file declares. In
// "`name` in `file.go`" that file declares it.
func TestArchitecture(t *testing.T) {
	redistest.InOneGoroutine(t)
	in, anywhere := map[string]map[string]bool{}, map[string]bool{}
	require.NoError(t, fs.WalkDir(os.DirFS("."), ".", func(path string, _ fs.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, ".go") {
			in[path] = declared(t, path)
			for name := range in[path] {
				anywhere[name] = true
			}
		}
		return err
	}))
	quoted := regexp.MustCompile("`([\\w./]+)`(?: in `([\\w/]+\\.go)`)?")
	pages, err := fs.Glob(os.DirFS("."), "docs/architecture*.md")
	require.NoError(t, err)
	require.Subset(t, pages, []string{"docs/architecture.md", "docs/architecture-console.md", "docs/architecture-gateway.md", "docs/architecture-registry.md"})
	for _, page := range pages {
		text, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, m := range quoted.FindAllStringSubmatch(string(text), -1) {
			if name, file := m[1], m[2]; file != "" {
				assert.True(t, in[file][name], "%s: %s declares no %s", page, file, name)
			} else if !anywhere[name] {
				_, err := os.Stat(name)
				assert.NoError(t, err, "%s: nothing is called %s", page, name)
			}
		}
	}
}

// declared returns the names that a file declares: functions, types, variables and constants; methods and fields as name and as Type.name.
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

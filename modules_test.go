package tokenbucket_test

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const library = "github.com/go-tokenbucket/tokenbucket"

// testSupport are the internal packages that tests of nested modules import. go build of a program that requires such a module does not look
// at its tests, but go mod tidy does: it must find these packages in whatever version of the library the program has. So none of them is ever
// removed or renamed. What they contain may change.
var testSupport = []string{library + "/internal/redistest", library + "/internal/telemetrytest", library + "/internal/tries/triestest"}

// A nested module uses the library's public packages alone, because a program may require the module together with another version of the
// library, and internal packages change without notice. Tests run in a checkout, where all modules have one version: see testSupport for
// what they may import. Modules without releases are exempt, as they are only built in a checkout.
func TestNestedModulesUseThePublicAPI(t *testing.T) {
	withoutReleases := []string{"benchmarks", "integration"}
	checked := map[string]int{} // files by module
	require.NoError(t, filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (slices.Contains(withoutReleases, path) || strings.HasPrefix(entry.Name(), ".") && path != "."):
			return filepath.SkipDir
		case entry.IsDir() || !strings.HasSuffix(path, ".go"):
			return nil
		}
		module := moduleOf(path)
		if module == "." {
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		checked[module]++
		for _, spec := range file.Imports {
			imported := strings.Trim(spec.Path.Value, `"`)
			if !strings.HasPrefix(imported, library+"/internal/") || strings.HasSuffix(path, "_test.go") && slices.Contains(testSupport, imported) {
				continue
			}
			t.Errorf("%s imports %s: make public what the module needs, or move it there", path, imported)
		}
		return nil
	}))
	for _, module := range []string{"cmd", "console", "contrib/grpc", "contrib/otel", "contrib/prometheus", "examples", "postgres"} {
		require.Positive(t, checked[filepath.FromSlash(module)], "%s: no file was checked", module)
	}
	for _, support := range testSupport {
		require.DirExists(t, strings.TrimPrefix(support, library+"/"))
	}
}

// moduleOf returns the folder of the module that a file belongs to.
func moduleOf(file string) string {
	dir := filepath.Dir(file)
	for ; dir != "."; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	return dir
}

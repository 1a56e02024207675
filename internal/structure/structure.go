// Package structure measures Go packages: how long their functions and files are, how many fields their structs have, how many
// names they export, and which of a package's files use which others. It counts what is not a test and not generated.
package structure

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Package is a package that was loaded, with its types.
type Package struct {
	Path  string // import path
	Files []File // by name

	fset  *token.FileSet
	info  *types.Info
	types *types.Package
}

// File is one file of a package.
type File struct {
	Name  string // without the directory
	Lines int

	syntax *ast.File
}

// Sized is a function with its lines, or a struct with its fields.
type Sized struct {
	File, Name string
	Size       int
}

// Arrow says that one file uses what another file of its package declares.
type Arrow struct{ From, To string }

// listed is what the go command tells of a package.
type listed struct {
	Dir, ImportPath, Export string
	GoFiles                 []string
	DepOnly                 bool // not named by a pattern
	Module                  *struct{ Path string }
}

// Load loads packages as the go command finds them from a directory, and with them all of the module's internal packages that
// they use. Tests are left out.
func Load(dir string, patterns ...string) ([]*Package, error) {
	all, err := list(dir, patterns)
	if err != nil {
		return nil, err
	}
	export, internals := map[string]string{}, ""
	for _, p := range all {
		export[p.ImportPath] = p.Export
		if !p.DepOnly && p.Module != nil {
			internals = p.Module.Path + "/internal/"
		}
	}
	fset := token.NewFileSet()
	imports := importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) {
		if export[path] == "" {
			return nil, fmt.Errorf("structure: %s is not compiled", path)
		}
		return os.Open(export[path])
	})
	var packages []*Package
	for _, p := range all {
		if p.DepOnly && (internals == "" || !strings.HasPrefix(p.ImportPath, internals)) {
			continue
		}
		loaded, err := load(fset, imports, p)
		if err != nil {
			return nil, err
		}
		packages = append(packages, loaded)
	}
	slices.SortFunc(packages, func(a, b *Package) int { return strings.Compare(a.Path, b.Path) })
	return packages, nil
}

// list asks the go command for packages and all that they use.
func list(dir string, patterns []string) ([]listed, error) {
	args := []string{"list", "-export", "-deps", "-json=Dir,ImportPath,Export,GoFiles,DepOnly,Module", "--"}
	cmd := exec.Command("go", append(args, patterns...)...)
	cmd.Dir = dir
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("structure: %v: %w\n%s", cmd.Args, err, &stderr)
	}
	var packages []listed
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return packages, nil
		} else if err != nil {
			return nil, fmt.Errorf("structure: %v: %w", cmd.Args, err)
		}
		packages = append(packages, p)
	}
}

func load(fset *token.FileSet, imports types.Importer, from listed) (*Package, error) {
	p := &Package{Path: from.ImportPath, fset: fset, info: &types.Info{
		Defs: map[*ast.Ident]types.Object{},
		Uses: map[*ast.Ident]types.Object{},
	}}
	var syntax []*ast.File
	for _, name := range from.GoFiles {
		file := filepath.Join(from.Dir, name)
		src, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("structure: %w", err)
		}
		f, err := parser.ParseFile(fset, file, src, parser.ParseComments|parser.SkipObjectResolution)
		if err != nil {
			return nil, fmt.Errorf("structure: %w", err)
		}
		syntax = append(syntax, f)
		if !ast.IsGenerated(f) {
			p.Files = append(p.Files, File{name, bytes.Count(src, []byte("\n")), f})
		}
	}
	var err error
	config := types.Config{Importer: imports}
	if p.types, err = config.Check(p.Path, fset, syntax, p.info); err != nil {
		return nil, fmt.Errorf("structure: %w", err)
	}
	return p, nil
}

// Lines of all files.
func (p *Package) Lines() (lines int) {
	for _, f := range p.Files {
		lines += f.Lines
	}
	return lines
}

// Functions are all functions and methods, by their lines, signature and closing brace included.
func (p *Package) Functions() []Sized {
	var functions []Sized
	p.eachFunction(func(f *File, d *ast.FuncDecl) {
		lines := p.fset.Position(d.End()).Line - p.fset.Position(d.Pos()).Line + 1
		functions = append(functions, Sized{f.Name, functionName(d), lines})
	})
	return bySize(functions)
}

// Structs are all struct types that are declared by a name, by their fields. An embedded type is one field.
func (p *Package) Structs() []Sized {
	var structs []Sized
	p.eachSpec(func(f *File, spec ast.Spec) {
		t, ok := spec.(*ast.TypeSpec)
		if !ok {
			return
		}
		s, ok := t.Type.(*ast.StructType)
		if !ok {
			return
		}
		fields := 0
		for _, field := range s.Fields.List {
			fields += max(1, len(field.Names))
		}
		structs = append(structs, Sized{f.Name, t.Name.Name, fields})
	})
	return bySize(structs)
}

// Exported are the names that users of the package see: constants, variables, functions, types, and the methods of exported types.
// Fields and the methods of interfaces are not counted.
func (p *Package) Exported() []string {
	var names []string
	p.eachFunction(func(_ *File, d *ast.FuncDecl) {
		if d.Name.IsExported() && (d.Recv == nil || ast.IsExported(receiver(d))) {
			names = append(names, functionName(d))
		}
	})
	p.eachSpec(func(_ *File, spec ast.Spec) {
		switch s := spec.(type) {
		case *ast.TypeSpec:
			if s.Name.IsExported() {
				names = append(names, s.Name.Name)
			}
		case *ast.ValueSpec:
			for _, name := range s.Names {
				if name.IsExported() {
					names = append(names, name.Name)
				}
			}
		}
	})
	slices.Sort(names)
	return names
}

// Arrows tells for each arrow between files of the package which names it stands for: those of the second file that the first one
// uses. A method or a field is named after its type, if that has a name.
func (p *Package) Arrows() map[Arrow][]string {
	owners := p.owners()
	used := map[Arrow]map[string]bool{}
	for ident, object := range p.info.Uses {
		object = origin(object)
		if object.Pkg() != p.types || !object.Pos().IsValid() {
			continue
		}
		if _, ok := object.(*types.PkgName); ok {
			continue
		}
		arrow := Arrow{p.fileOf(ident.Pos()), p.fileOf(object.Pos())}
		if arrow.From == arrow.To {
			continue
		}
		if used[arrow] == nil {
			used[arrow] = map[string]bool{}
		}
		name := object.Name()
		if owner := owners[object]; owner != "" {
			name = owner + "." + name
		}
		used[arrow][name] = true
	}
	arrows := map[Arrow][]string{}
	for arrow, names := range used {
		arrows[arrow] = slices.Sorted(maps.Keys(names))
	}
	return arrows
}

// owners are the types that fields and methods belong to.
func (p *Package) owners() map[types.Object]string {
	owners := map[types.Object]string{}
	for _, object := range p.info.Defs {
		t, ok := object.(*types.TypeName)
		if !ok || t.IsAlias() {
			continue
		}
		named, ok := t.Type().(*types.Named)
		if !ok {
			continue
		}
		for m := range named.Methods() {
			owners[m] = t.Name()
		}
		switch under := named.Underlying().(type) {
		case *types.Struct:
			for f := range under.Fields() {
				owners[f] = t.Name()
			}
		case *types.Interface:
			for m := range under.ExplicitMethods() {
				owners[m] = t.Name()
			}
		}
	}
	return owners
}

// origin is the declaration behind an instance of something generic.
func origin(object types.Object) types.Object {
	switch o := object.(type) {
	case *types.Func:
		return o.Origin()
	case *types.Var:
		return o.Origin()
	}
	return object
}

func (p *Package) fileOf(pos token.Pos) string { return filepath.Base(p.fset.Position(pos).Filename) }

func (p *Package) eachFunction(do func(*File, *ast.FuncDecl)) {
	for i := range p.Files {
		for _, d := range p.Files[i].syntax.Decls {
			if d, ok := d.(*ast.FuncDecl); ok {
				do(&p.Files[i], d)
			}
		}
	}
}

func (p *Package) eachSpec(do func(*File, ast.Spec)) {
	for i := range p.Files {
		for _, d := range p.Files[i].syntax.Decls {
			if d, ok := d.(*ast.GenDecl); ok {
				for _, spec := range d.Specs {
					do(&p.Files[i], spec)
				}
			}
		}
	}
}

// functionName is the name of a function, or of a method with its type.
func functionName(d *ast.FuncDecl) string {
	if d.Recv == nil {
		return d.Name.Name
	}
	return receiver(d) + "." + d.Name.Name
}

// receiver is the name of a method's type.
func receiver(d *ast.FuncDecl) string {
	t := d.Recv.List[0].Type
	if star, ok := t.(*ast.StarExpr); ok {
		t = star.X
	}
	switch generic := t.(type) {
	case *ast.IndexExpr:
		t = generic.X
	case *ast.IndexListExpr:
		t = generic.X
	}
	if name, ok := t.(*ast.Ident); ok {
		return name.Name
	}
	return ""
}

// bySize sorts the largest first.
func bySize(all []Sized) []Sized {
	slices.SortFunc(all, func(a, b Sized) int {
		if a.Size != b.Size {
			return b.Size - a.Size
		}
		return strings.Compare(a.File+a.Name, b.File+b.Name)
	})
	return all
}

// Command binaries builds what the release workflow publishes, as .goreleaser.yaml configures it: binaries, archives, lists of components
// and checksums. .ci/binaries runs it.
//
// It reads the configuration with goreleaser's own package, which rejects fields that goreleaser does not have. goreleaser itself is not
// run: its modules are over two gigabytes. Templates are not evaluated, and nothing is published.
package main

import (
	"archive/tar"
	"archive/zip"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goreleaser/goreleaser/v2/pkg/config"
)

func main() {
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// run builds the artefacts in dir. components is the program that lists the modules in a binary.
func run(dir, components string) error {
	project, err := config.Load(".goreleaser.yaml")
	if err != nil {
		return err
	}
	build, archive, list := project.Builds[0], project.Archives[0], project.SBOMs[0]
	var made []string
	for _, system := range build.Goos {
		for _, processor := range build.Goarch {
			name := filepath.Join(dir, fmt.Sprintf("%s_%s_%s", project.ProjectName, system, processor))
			binary := filepath.Join(name, build.Binary)
			if system == "windows" {
				binary += ".exe"
			}
			args := slices.Concat([]string{"build", "-o", binary}, build.Flags, []string{"-ldflags", strings.Join(build.Ldflags, " "), build.Main})
			if err := command(append(build.Env, "GOOS="+system, "GOARCH="+processor), "go", args...); err != nil {
				return err
			}
			args = slices.Clone(list.Args)
			for i, arg := range args {
				args[i] = strings.NewReplacer("$document", name+".bom.json", "../$artifact", binary).Replace(arg)
			}
			if err := command(nil, components, args...); err != nil {
				return err
			}
			format := archive.Formats[0]
			for _, o := range archive.FormatOverrides {
				if o.Goos == system {
					format = o.Formats[0]
				}
			}
			files := []string{binary}
			for _, f := range archive.Files {
				files = append(files, f.Source)
			}
			if err := pack(name+"."+format, files); err != nil {
				return err
			}
			made = append(made, binary, name+"."+format, name+".bom.json")
		}
	}
	return sum(filepath.Join(dir, project.Checksum.NameTemplate), made)
}

func command(env []string, name string, args ...string) error {
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), env...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s %v %s: %w\n%s", env, name, strings.Join(args, " "), err, out)
	}
	return nil
}

// pack writes files to an archive, whose format is the end of its name.
func pack(archive string, files []string) error {
	out, err := os.Create(archive)
	if err != nil {
		return err
	}
	defer func() { _ = out.Close() }()
	var entry func(name string, info os.FileInfo) (io.Writer, error)
	var end []io.Closer
	switch {
	case strings.HasSuffix(archive, ".zip"):
		z := zip.NewWriter(out)
		end = append(end, z)
		entry = func(name string, _ os.FileInfo) (io.Writer, error) { return z.Create(name) }
	case strings.HasSuffix(archive, ".tar.gz"):
		g := gzip.NewWriter(out)
		t := tar.NewWriter(g)
		end = append(end, t, g)
		entry = func(name string, info os.FileInfo) (io.Writer, error) {
			return t, t.WriteHeader(&tar.Header{Name: name, Mode: int64(info.Mode().Perm()), Size: info.Size(), ModTime: info.ModTime()})
		}
	default:
		return fmt.Errorf("%s: want a format that is zip or tar.gz", archive)
	}
	for i, file := range files {
		name := file
		if i == 0 {
			name = filepath.Base(file) // the binary
		}
		if err := add(entry, name, file); err != nil {
			return err
		}
	}
	for _, c := range end {
		if err := c.Close(); err != nil {
			return err
		}
	}
	return nil
}

func add(entry func(string, os.FileInfo) (io.Writer, error), name, file string) error {
	in, err := os.Open(file)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	w, err := entry(name, info)
	if err != nil {
		return err
	}
	_, err = io.Copy(w, in)
	return err
}

// sum writes the checksums of the archives and lists, and prints the size of every artefact.
func sum(file string, made []string) error {
	var sums strings.Builder
	for _, name := range made {
		content, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		path := filepath.Base(name)
		if filepath.Ext(name) == "" || filepath.Ext(name) == ".exe" {
			path = filepath.Join(filepath.Base(filepath.Dir(name)), path)
		} else {
			fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(content), path)
		}
		fmt.Printf("%10d  %s\n", len(content), path)
	}
	fmt.Printf("%10d  %s\n", sums.Len(), filepath.Base(file))
	return os.WriteFile(file, []byte(sums.String()), 0o644)
}

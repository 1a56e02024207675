// Package filesource reads the limits of a gateway from a YAML file, as a registry.Source. The document is
//
//	limits:
//	  - name: /ibe/AvailFare
//	    rate: 5
//
// and example.yaml shows all keys. If the document has another shape, the load fails and the limits loaded before stay in
// force. An invalid item is rejected alone, like a row of a table.
//
// Each load opens the file by its name. So it sees a new file that was renamed over the old one, and a changed symbolic link,
// as Kubernetes makes for a ConfigMap.
package filesource

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// mostBytes bounds the file: one that is larger is not a list of limits.
const mostBytes = 16 << 20

// Source is a file. Between two loads it keeps the time of the file only.
type Source struct {
	Path string
	// Quota says that items are hard quotas unless they say otherwise; Jitter is theirs unless they name one, 0 to 1 s.
	Quota  bool
	Jitter time.Duration

	modified time.Time // of the file that was loaded last
	version  int64
}

// versionOf returns the version of a file that was modified at that time: the time, unless an older file was put in place of a newer one. Then it is the
// present time, since that file is in force now.
func (s *Source) versionOf(modified time.Time) int64 {
	if modified.Equal(s.modified) {
		return s.version
	}
	version := max(modified.UnixMicro(), 0)
	if version <= s.version {
		version = max(time.Now().UnixMicro(), s.version+1)
	}
	s.modified, s.version = modified, version
	return version
}

// Load implements registry.Source. It returns soon after ctx ends. The version of all limits is the time at which the file was modified, or put in
// place of a newer one.
func (s *Source) Load(ctx context.Context) (registry.Table, error) {
	text, modified, err := s.read()
	if err != nil {
		return registry.Table{}, fmt.Errorf("filesource: %w", err)
	}
	items, err := itemsOf(ctx, text)
	if err != nil {
		return registry.Table{}, fmt.Errorf("filesource: %s: %w", s.Path, err)
	}
	t, version := registry.Table{Lines: []int{}}, s.versionOf(modified)
	for _, n := range items {
		if err := ctx.Err(); err != nil {
			return registry.Table{}, fmt.Errorf("filesource: %s: %w", s.Path, err)
		}
		p := parser{file: filepath.Base(s.Path), line: n.Line}
		// The line is no part of Row: limits do not change because a line was added above them.
		p.limit = registry.Limit{Row: p.file, Version: version, MaxWait: registry.DefaultMaxWait, Quota: s.Quota, Jitter: s.Jitter}
		if bad := p.read(n); bad != nil {
			t.Rejected = append(t.Rejected, *bad)
			continue
		}
		t.Limits, t.Lines = append(t.Limits, p.limit), append(t.Lines, n.Line)
	}
	return t, nil
}

func (s *Source) read() (text []byte, modified time.Time, err error) {
	about, err := os.Stat(s.Path) // opening a pipe would block until there is a writer
	if err != nil {
		return nil, modified, err
	}
	if !about.Mode().IsRegular() {
		return nil, modified, fmt.Errorf("%s: want a file", s.Path)
	}
	f, err := os.Open(s.Path)
	if err != nil {
		return nil, modified, err
	}
	defer func() { _ = f.Close() }()
	if about, err = f.Stat(); err != nil { // the link may have changed
		return nil, modified, err
	}
	if text, err = io.ReadAll(io.LimitReader(f, mostBytes+1)); err != nil {
		return nil, modified, err
	}
	if len(text) > mostBytes {
		return nil, modified, fmt.Errorf("%s: more than %d bytes: want a list of limits", s.Path, mostBytes)
	}
	return text, about.ModTime(), nil
}

// itemsOf returns the items of the list, each with its line. Errors name the line and the expected value.
func itemsOf(ctx context.Context, text []byte) ([]*yaml.Node, error) {
	var document *yaml.Node
	err := decode(ctx, text, func(n *yaml.Node) error {
		if document != nil {
			return fmt.Errorf("line %d: a second document: want one", n.Line)
		}
		document = n
		return nil
	})
	switch {
	case err != nil:
		return nil, err
	case document == nil:
		return nil, errors.New(`line 1: the document is empty: want "limits:" and a list; "limits: []" for none`)
	}
	root := resolve(document.Content[0])
	if root.Kind != yaml.MappingNode {
		return nil, fmt.Errorf(`line %d: the document is %s: want "limits:" and a list`, root.Line, show(root))
	}
	var list *yaml.Node
	for i := 0; i < len(root.Content); i += 2 {
		key, value := root.Content[i], resolve(root.Content[i+1])
		switch {
		case key.Value != "limits":
			return nil, fmt.Errorf("line %d: key %s: want no other than limits", key.Line, show(key))
		case list != nil:
			return nil, fmt.Errorf("line %d: limits for the second time: want one list", key.Line)
		case value.Kind != yaml.SequenceNode:
			return nil, fmt.Errorf("line %d: limits %s: want a list, [] for none", key.Line, show(value))
		}
		list = value
	}
	if list == nil {
		return nil, fmt.Errorf(`line %d: the document has no limits: want "limits:" and a list`, root.Line)
	}
	return list.Content, nil
}

// resolve returns what an alias stands for.
func resolve(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

// show is a value for a message.
func show(n *yaml.Node) string {
	switch {
	case n == nil:
		return "missing"
	case n.Kind == yaml.MappingNode:
		return "a map"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case n.ShortTag() == "!!null":
		return "without a value"
	}
	return fmt.Sprintf("%.40q", n.Value)
}

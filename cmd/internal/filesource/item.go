package filesource

import (
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/go-tokenbucket/tokenbucket/registry"
)

// keys are all keys of an item, in the order in which they are read, and known has the older ones, too.
var keys, known = func() (keys, known []string) {
	for _, f := range registry.Fields() {
		keys, known = append(keys, f.Key), append(known, f.Names()...)
	}
	return keys, known
}()

// parser reads one item.
type parser struct {
	file  string
	line  int // of the item
	limit registry.Limit
	nodes map[string]*yaml.Node // by key
}

func (p *parser) reject(key string, n *yaml.Node, want string) *registry.RowError {
	line := p.line
	if n != nil {
		line = n.Line
	}
	return &registry.RowError{Row: fmt.Sprint(p.file, ":", line), Name: p.limit.Name, Field: key, Value: show(n), Want: want, Shadow: p.limit.Shadow}
}

// read converts the item, or returns the reason for rejecting it. Of a disabled item only the name is checked.
func (p *parser) read(n *yaml.Node) *registry.RowError {
	item := resolve(n)
	if item.Kind != yaml.MappingNode {
		return p.reject("item", item, "a map with name and rate")
	}
	bad := p.collect(item)
	wrong := p.limit.Read(registry.InFile, func(f *registry.Field, name int) []byte {
		if value := p.nodes[key(f, name)]; value != nil {
			return []byte(text(value))
		}
		return nil
	})
	switch {
	case wrong != nil && (bad == nil || wrong.Field.Key == "name"):
		return p.wrong(wrong)
	case bad != nil && !p.limit.Disabled:
		bad.Name, bad.Shadow = p.limit.Name, p.limit.Shadow
		return bad
	}
	return nil
}

// key returns one of the names of a field.
func key(f *registry.Field, name int) string {
	if name == 0 {
		return f.Key
	}
	return f.Older[name-1]
}

// wrong returns the error of a value.
func (p *parser) wrong(w *registry.Wrong) *registry.RowError {
	field := key(w.Field, w.Name)
	if w.Other == w.Name {
		return p.reject(field, p.nodes[field], w.Want)
	}
	other := key(w.Field, w.Other)
	bad := p.reject(field, p.nodes[field], registry.Twice(other, show(p.nodes[other])))
	bad.Other = other
	return bad
}

// text returns the text of a scalar. For anything else it returns one that no field accepts.
func text(n *yaml.Node) string {
	if n == nil || n.Kind != yaml.ScalarNode || n.ShortTag() == "!!null" {
		return "\xff"
	}
	return n.Value
}

// keep keeps the first thing that is wrong.
func (p *parser) keep(bad **registry.RowError, key string, n *yaml.Node, want string) {
	if *bad == nil {
		*bad = p.reject(key, n, want)
	}
}

// collect finds the values by their keys, and the first key that is none.
func (p *parser) collect(item *yaml.Node) (bad *registry.RowError) {
	p.nodes = map[string]*yaml.Node{}
	for i := 0; i < len(item.Content); i += 2 {
		key, value := item.Content[i], resolve(item.Content[i+1])
		switch {
		case key.Kind != yaml.ScalarNode || !slices.Contains(known, key.Value):
			p.keep(&bad, "key", key, "one of "+strings.Join(keys, ", "))
		case p.nodes[key.Value] != nil:
			p.keep(&bad, "key", key, "each key once")
		default:
			p.nodes[key.Value] = value
		}
	}
	return bad
}

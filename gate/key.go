package gate

import "strings"

// Key joins parts to one key, with "|" between them. It writes "\" before a "|" or "\" within a part, so that different parts
// never make the same key. registry.WithParts reads such keys.
func Key(parts ...string) string {
	var key strings.Builder
	for i, part := range parts {
		if i > 0 {
			key.WriteByte('|')
		}
		_, _ = escape.WriteString(&key, part)
	}
	return key.String()
}

var escape = strings.NewReplacer(`\`, `\\`, `|`, `\|`)

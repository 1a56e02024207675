package gateway

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Consoles with the same file of users have the same key of forms, and others another.
func TestFormKey(t *testing.T) {
	key := func(text string) []byte {
		path := filepath.Join(t.TempDir(), "users")
		require.NoError(t, os.WriteFile(path, []byte(text), 0o600))
		o, err := given(t, append(append([]string{}, enough...), "--console-users", path), nil, "")
		require.NoError(t, err)
		c, err := o.parse()
		require.NoError(t, err)
		return c.access.Key
	}
	const ann = "write ann a-token-of-hers-alone\n"
	require.Len(t, key(ann), 32)
	require.Equal(t, key(ann), key(ann))
	require.NotEqual(t, key(ann), key(strings.Replace(ann, "hers", "mine", 1)))
	require.Empty(t, key("# nobody\n"), "it would be everybody's")
}

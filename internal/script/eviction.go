package script

import (
	"context"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Eviction is what a server does when its memory is short.
type Eviction struct {
	// Policy is the server's maxmemory-policy, and MaxMemory its limit in bytes, as the server prints it; "0" is none.
	Policy, MaxMemory string
}

// Evicts reports whether the server may remove a key that has a time to live before that has passed.
func (e Eviction) Evicts() bool {
	limited := e.MaxMemory != "" && e.MaxMemory != "0"
	return limited && e.Policy != "" && e.Policy != "noeviction"
}

// AskEviction asks a server for its eviction policy, by INFO, which more users may run than CONFIG. The zero value means that the server does
// not tell it: not every managed server does, and not every user may ask.
func AskEviction(ctx context.Context, client Client) (e Eviction) {
	cmd := Once{redis.NewCmd(ctx, "info", "memory")}
	if err := client.Process(ctx, cmd); err != nil {
		return Eviction{}
	}
	text, _ := cmd.Text()
	for line := range strings.Lines(text) {
		switch field, value, _ := strings.Cut(strings.TrimSpace(line), ":"); field {
		case "maxmemory_policy":
			e.Policy = value
		case "maxmemory":
			e.MaxMemory = value
		}
	}
	return e
}

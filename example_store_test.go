package tokenbucket_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/storetest"
)

// fileStore keeps buckets in a file, so that a process goes on where it stopped.
type fileStore struct {
	mu   sync.Mutex
	path string
}

// entry is a state, which is text, and when it expires.
type entry struct {
	State string    `json:"state"`
	Until time.Time `json:"until"`
}

// Apply implements tokenbucket.Store: read, decide, write, as one step.
func (s *fileStore) Apply(_ context.Context, b *tokenbucket.Batch) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[string]entry{}
	text, err := os.ReadFile(s.path)
	if err == nil {
		err = json.Unmarshal(text, &all)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	names, now := b.Names, time.Now()
	states := make([][]byte, len(names)) // nil: there is none
	for i, name := range names {
		if e, ok := all[name]; ok && now.Before(e.Until) {
			states[i] = []byte(e.State)
		}
	}
	next, ttl, err := b.Decide(now.UnixMicro(), states)
	if err != nil {
		return err
	}
	for i, name := range names {
		if next[i] != nil { // nil: it stays as it is
			all[name] = entry{string(next[i]), now.Add(ttl)}
		}
	}
	if text, err = json.MarshalIndent(all, "", "\t"); err == nil {
		err = os.WriteFile(s.path+".new", text, 0o600)
	}
	if err != nil {
		return err
	}
	return os.Rename(s.path+".new", s.path) // all of it, or nothing
}

// A store of one's own: buckets in a file.
func ExampleStore() {
	dir, err := os.MkdirTemp("", "buckets")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	for range 3 { // a process that starts three times
		store := &fileStore{path: filepath.Join(dir, "buckets.json")}
		limiter, err := tokenbucket.NewSmoothBursty("mails", 1.0/60, tokenbucket.WithStore(store), tokenbucket.WithInitialPermits(1))
		if err != nil {
			panic(err) // the configuration is wrong; the message names the field
		}
		ok, err := limiter.Try(context.Background())
		fmt.Println(ok, err)
	}
	// Output:
	// true <nil>
	// false <nil>
	// false <nil>
}

func TestFileStore(t *testing.T) {
	storetest.Run(t, func(t *testing.T) func() tokenbucket.Store {
		store := &fileStore{path: filepath.Join(t.TempDir(), "buckets.json")}
		return func() tokenbucket.Store { return store }
	})
}

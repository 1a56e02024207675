// Command worker is a process of a fleet that is built with the previous release. Processes of this release are the test binary itself.
package main

import (
	"fmt"
	"os"

	"github.com/go-tokenbucket/tokenbucket/integration/internal/worker"
	"github.com/go-tokenbucket/tokenbucket/integration/upgrade/task"
)

func main() {
	worker.Main(task.Env, task.Run)
	fmt.Fprintln(os.Stderr, "worker: no job in the environment variable", task.Env)
	os.Exit(2)
}

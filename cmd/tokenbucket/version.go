package main

import (
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
)

// version returns the module's version, the commit and the Go version of this build, as far as the build info has them.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	commit := ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			commit = s.Value[:min(len(s.Value), 12)] + commit + ", "
		case s.Key == "vcs.modified" && s.Value == "true":
			commit += "modified, "
		}
	}
	return fmt.Sprintf("%s (%s%s)", release(info.Main.Version), commit, info.GoVersion)
}

// release returns a module's version, or a placeholder for a build of a checkout without a tag.
func release(version string) string {
	if version == "" || version == "(devel)" {
		return "unreleased"
	}
	return version
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version of this build",
		Args:  cobra.NoArgs,
		Run:   func(cmd *cobra.Command, _ []string) { fmt.Fprintln(cmd.OutOrStdout(), "tokenbucket", version()) },
	}
}

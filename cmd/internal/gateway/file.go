package gateway

import (
	"context"
	"database/sql"
	"fmt"
	"strings"

	"github.com/go-tokenbucket/tokenbucket/cmd/internal/filesource"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
)

const fileScheme = "file://"

// parseFile parses --limits file://path. It rejects settings that apply only to a database.
func (c *config) parseFile(path string) error {
	if path == "" || strings.ContainsAny(path, "?#") {
		return c.bad("limits", fmt.Sprintf("%q", c.limits), "file://FILE without parameters, such as file:///etc/tokenbucket/limits.yaml")
	}
	for _, flag := range []string{"table", "columns", "create-table"} {
		if c.given != nil && c.given.Changed(flag) {
			return c.bad(flag, c.given.Lookup(flag).Value, "none: the limits are in a file")
		}
	}
	if c.options.switchAt == "sql" {
		return c.bad("switch", `"sql"`, "none or redis:KEY: the limits are in a file")
	}
	c.file = &filesource.Source{Path: path, Quota: c.quota, Jitter: c.jitter}
	return nil
}

// openLimits opens the source of the limits. db is nil if that is a file.
func (s *service) openLimits(ctx context.Context) (source registry.Source, db *sql.DB, err error) {
	if s.config.file != nil {
		return s.config.file, nil, nil
	}
	if db, err = s.connect(ctx); err != nil {
		return nil, nil, err
	}
	s.onClose(func() { _ = db.Close() })
	table, err := sqlsource.New(db, s.config.database.dialect, s.config.database.options...)
	return hinting{table}, db, err
}

package postgres

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/go-tokenbucket/tokenbucket/semaphore"
)

// Errors, to be matched with errors.Is. An error that wraps one of them names the field and the value.
var (
	// ErrInvalidConfig: a pool, a schema, an option or the id of a permit is out of range.
	ErrInvalidConfig = errors.New("postgres: invalid configuration")
	// ErrSchema: the schema or a part of it is missing. Call Migrate.
	ErrSchema = errors.New("postgres: schema missing or too old: call Migrate")
	// ErrNewer: a newer release has migrated the schema. Its tables and functions for this release go on working.
	ErrNewer = errors.New("postgres: schema is newer than this release")
)

// Store is a schema in a database, as one process uses it. Its methods may be called by many goroutines at once. A process should have one
// Store for everything that it shares there, because each has a connection of its own for LISTEN, which exists only while requests wait.
// Only the pool needs to be closed.
type Store struct {
	pool     *pgxpool.Pool
	schema   string // quoted
	listener *listener
	explicit atomic.Bool // begin transactions as READ COMMITTED, because the default is another isolation
}

// Option configures a Store, or Migrate. An option with a bad value makes them fail.
type Option func(*options)

type options struct {
	schema string
	listen *pgx.ConnConfig
}

// DefaultSchema is the schema of the tables and functions without WithSchema.
const DefaultSchema = "tokenbucket"

const maxIdentifier = 63 // bytes; a limit of PostgreSQL

// WithSchema sets the schema of the package's tables and functions, 1 to 63 bytes; default DefaultSchema. Upper and lower case differ.
func WithSchema(name string) Option {
	return func(o *options) { o.schema = name }
}

// WithListenConfig sets how to connect for LISTEN, which wakes waiters. Set it to connect directly to the server if the pool goes through a
// proxy that pools connections by transaction, where LISTEN does not work. The default is the pool's own configuration. If that turns out
// to lead to such a proxy, the process does not listen, and a grant is found within two seconds (two thirds of a lease, if that is less)
// instead of at once.
func WithListenConfig(c *pgx.ConnConfig) Option {
	return func(o *options) { o.listen = c }
}

// New returns a store on a pool. It does not connect.
func New(pool *pgxpool.Pool, opts ...Option) (*Store, error) {
	o, err := configure(pool, opts)
	if err != nil {
		return nil, err
	}
	return &Store{pool: pool, schema: quoted(o.schema), listener: newListener(pool, o.listen)}, nil
}

func configure(pool *pgxpool.Pool, opts []Option) (*options, error) {
	o := &options{schema: DefaultSchema}
	if pool == nil {
		return nil, fmt.Errorf("%w: pool nil: want a pool", ErrInvalidConfig)
	}
	for _, opt := range opts {
		if opt == nil {
			return nil, fmt.Errorf("%w: option nil: want no nil options", ErrInvalidConfig)
		}
		opt(o)
	}
	if len(o.schema) < 1 || len(o.schema) > maxIdentifier || !utf8.ValidString(o.schema) ||
		strings.ContainsRune(o.schema, 0) || strings.HasPrefix(o.schema, "pg_") {
		return nil, fmt.Errorf("%w: schema %.80q: want 1 to 63 bytes of UTF-8 that do not begin with pg_", ErrInvalidConfig, o.schema)
	}
	return o, nil
}

func quoted(identifier string) string { return pgx.Identifier{identifier}.Sanitize() }

// NewSemaphore returns a semaphore in the default schema, which all processes share that use the same name. It makes a Store of its own; a
// process with several semaphores should have one Store for all.
func NewSemaphore(pool *pgxpool.Pool, name string, permits int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
	s, err := New(pool)
	if err != nil {
		return nil, err
	}
	return s.Semaphore(name, permits, opts...)
}

// Semaphore returns a semaphore which all processes share that use the same name and schema. permits is the number for this process's own
// requests, unless a version is set ([semaphore.WithVersion], SetPermits). Options for Redis have no effect. It is cheap to call.
func (s *Store) Semaphore(name string, permits int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
	return semaphore.New(&semaphoreStore{store: s, name: name}, name, permits, opts...)
}

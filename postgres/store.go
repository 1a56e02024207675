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

// Errors, to be matched with errors.Is. What wraps them names the field and the value.
var (
	// ErrInvalid: an argument or an option is out of range.
	ErrInvalid = errors.New("postgres: invalid argument")
	// ErrSchema: the schema, or something in it, is missing. Call Migrate.
	ErrSchema = errors.New("postgres: schema missing or too old: call Migrate")
	// ErrNewer: the schema was migrated by a newer release. What it keeps of this one's goes on working.
	ErrNewer = errors.New("postgres: schema is newer than this release")
)

// Store is a place in a database, as one process sees it. Its methods may be called by many goroutines at once. A process
// should have one for all that it shares there, since each has a connection of its own to listen on; that is there only
// while anybody waits. Nothing need be closed but the pool.
type Store struct {
	pool     *pgxpool.Pool
	schema   string // quoted
	listener *listener
	explicit atomic.Bool // transactions are begun, and are READ COMMITTED: by default they are not
}

// Option configures a Store, or Migrate. An option with a bad value makes them fail.
type Option func(*options)

type options struct {
	schema string
	listen *pgx.ConnConfig
}

// DefaultSchema is where tables and functions are, unless WithSchema says otherwise.
const DefaultSchema = "tokenbucket"

const maxIdentifier = 63 // bytes, of PostgreSQL

// WithSchema sets the schema in which the package keeps all that is its, 1 to 63 bytes; default DefaultSchema. Upper and
// lower case are told apart.
func WithSchema(name string) Option {
	return func(o *options) { o.schema = name }
}

// WithListenConfig sets how to connect for LISTEN, on which whoever waits is woken: straight to the server, when the pool
// goes through a proxy that shares out connections by transaction, which LISTEN does not survive. By default it is the
// pool's own configuration; if that turns out to lead to such a proxy, nobody listens, and a grant is found within two
// seconds (two thirds of a lease, if that is less) instead of at once.
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
		return nil, fmt.Errorf("%w: pool nil: want a pool", ErrInvalid)
	}
	for _, opt := range opts {
		if opt == nil {
			return nil, fmt.Errorf("%w: option nil: want no nil options", ErrInvalid)
		}
		opt(o)
	}
	if len(o.schema) < 1 || len(o.schema) > maxIdentifier || !utf8.ValidString(o.schema) ||
		strings.ContainsRune(o.schema, 0) || strings.HasPrefix(o.schema, "pg_") {
		return nil, fmt.Errorf("%w: schema %.80q: want 1 to 63 bytes of UTF-8 that do not begin with pg_", ErrInvalid, o.schema)
	}
	return o, nil
}

func quoted(identifier string) string { return pgx.Identifier{identifier}.Sanitize() }

// NewSemaphore returns a semaphore that all processes share which use the same name, in the default schema: Semaphore of
// a store of its own. A process with several should have one store for all.
func NewSemaphore(pool *pgxpool.Pool, name string, permits int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
	s, err := New(pool)
	if err != nil {
		return nil, err
	}
	return s.Semaphore(name, permits, opts...)
}

// Semaphore returns a semaphore that all processes share which use the same name and schema. permits applies as long as
// nobody has called SetPermits, to each process' own requests. Options that are for Redis do nothing. New ones are cheap.
func (s *Store) Semaphore(name string, permits int, opts ...semaphore.Option) (*semaphore.Semaphore, error) {
	return semaphore.New(&backend{store: s, name: name}, name, permits, opts...)
}

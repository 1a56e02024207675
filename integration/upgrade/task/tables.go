package task

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"time"

	_ "github.com/go-sql-driver/mysql" // the driver of MariaDB
	"github.com/redis/go-redis/v9"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/registry"
	"github.com/go-tokenbucket/tokenbucket/registry/sqlsource"
	"github.com/go-tokenbucket/tokenbucket/slidingwindow"
)

func create(ctx context.Context, _ *redis.Client, t *Task, tell func(Event)) error {
	db, err := sql.Open("mysql", t.DSN)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	if err := sqlsource.CreateTable(ctx, db, sqlsource.MySQL); err != nil {
		return err
	}
	if err := sqlsource.CreateSwitchTable(ctx, db, sqlsource.MySQL); err != nil {
		return err
	}
	tell(Event{What: Done})
	return nil
}

// row is a limit in words that both releases have.
type row struct {
	Name, Row        string
	Disabled, NoRate bool
	Rate             float64
	WaitShare        float64
	Window           string
	WindowLimit      int
	Concurrent       int
	PerKey, Shadow   bool
	Version          int64
}

// table sends an event for each row, for each bad row, and for the switch.
func table(ctx context.Context, _ *redis.Client, t *Task, tell func(Event)) error {
	db, err := sql.Open("mysql", t.DSN)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	source, err := sqlsource.New(db, sqlsource.MySQL, tableOf(t)...)
	if err != nil {
		return err
	}
	rows, err := source.Load(ctx)
	if err != nil {
		return err
	}
	for i := range rows.Limits {
		l := &rows.Limits[i]
		text, err := json.Marshal(row{l.Name, l.Row, l.Disabled, l.NoRate, l.Rate, waitShare(l), l.Window.String(), l.WindowLimit,
			l.Concurrent, l.PerKey, l.Shadow, l.Version})
		if err != nil {
			return err
		}
		tell(Event{What: Line, Text: string(text)})
	}
	for _, bad := range rows.Rejected {
		tell(Event{What: Line, Text: fmt.Sprintf("bad row %q", bad.Name)})
	}
	s, err := sqlsource.NewSwitch(db, sqlsource.MySQL)
	if err != nil {
		return err
	}
	defer s.Close()
	tell(Event{What: Line, Text: fmt.Sprint("switch ", s.Enabled())})
	tell(Event{What: Done})
	return nil
}

// gateway has callers that enter a row of a table.
func gateway(ctx context.Context, client *redis.Client, t *Task, tell func(Event)) error {
	db, err := sql.Open("mysql", t.DSN)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	source, err := sqlsource.New(db, sqlsource.MySQL, tableOf(t)...)
	if err != nil {
		return err
	}
	s, err := store(client, t.Store)
	if err != nil {
		return err
	}
	var way trips
	opts := []registry.Option{registry.WithUnknown(registry.Refuse()), registry.WithLimiterOptions(
		tokenbucket.WithStoreTimeout(patience), tokenbucket.WithObserver(tokenbucket.Observer{Trip: way.note})),
		registry.WithWindows(func(name string, limit int, length, resolution time.Duration, more ...slidingwindow.Option) (*slidingwindow.Limiter, error) {
			return slidingwindow.New(name, limit, length, resolution, append(more, slidingwindow.WithRedis(client), windowTimeout(patience))...)
		})}
	if t.Interval > 0 {
		opts = append(opts, registry.WithInterval(t.Interval))
	}
	limits, err := registry.New(source, s, opts...)
	if err != nil {
		return err
	}
	defer limits.Close()
	t.callers(ctx, tell, func(int) error {
		asked := Micros()
		a, err := limits.Enter(context.Background(), t.Name)
		if err != nil {
			return err
		}
		defer a.Leave()
		if a.OK {
			tell(Event{What: Used, Permits: 1, From: asked - way.way(), To: Micros()})
		}
		return nil
	})
	return nil
}

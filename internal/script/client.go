package script

import (
	"errors"
	"fmt"
	"reflect"

	"github.com/redis/go-redis/v9"
)

// Usable returns an error if a client cannot run scripts: a nil client, a struct that embeds one, or a pipeline. A pipeline has the methods
// of a client, but sends nothing until its Exec.
func Usable(client Client) (err error) {
	if v := reflect.ValueOf(client); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return errors.New("nil")
	}
	if _, ok := client.(redis.Pipeliner); ok {
		return errors.New("pipeline")
	}
	defer func() {
		if value := recover(); value != nil {
			err = fmt.Errorf("%T, whose Options panics: %v", client, value)
		}
	}()
	switch c := client.(type) {
	case interface{ Options() *redis.Options }:
		c.Options()
	case interface{ Options() *redis.ClusterOptions }:
		c.Options()
	case interface{ Options() *redis.RingOptions }:
		c.Options()
	}
	return nil
}

// Bounded returns a client that shares the connections of the given one, and whose calls all return by the deadline of their context. It
// returns nil if that is impossible: for a cluster, for example, and for a client that must not set deadlines (ReadTimeout or WriteTimeout
// −2), because its connections may not support them, as through an SSH tunnel.
//
// Without ContextTimeoutEnabled, each read of a client may take its ReadTimeout, whatever the context, and a call on a new connection takes
// several reads. So the result is a copy (redis.Client.WithTimeout) that has this option and separate options. It has the hooks that the
// client has at the time of the call.
func Bounded(client Client) *redis.Client {
	c, ok := client.(*redis.Client)
	if !ok {
		return nil
	}
	given := c.Options()
	switch {
	case min(given.ReadTimeout, given.WriteTimeout) < 0:
		return nil
	case given.ContextTimeoutEnabled:
		return c
	}
	bounded := c.WithTimeout(0)
	own := bounded.Options()
	if own == given {
		return nil
	}
	own.ReadTimeout, own.WriteTimeout = given.ReadTimeout, given.WriteTimeout // WithTimeout(0) has reset them
	own.ContextTimeoutEnabled = true
	return bounded
}

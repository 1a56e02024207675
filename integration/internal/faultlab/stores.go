package faultlab

import "github.com/go-tokenbucket/tokenbucket"

// Kinds of stores that keep buckets in Redis.
var Kinds = []string{"script", "lock"}

// Stores are their constructors.
var Stores = map[string]func(tokenbucket.RedisClient, ...tokenbucket.RedisOption) tokenbucket.Store{
	"script": func(c tokenbucket.RedisClient, opts ...tokenbucket.RedisOption) tokenbucket.Store {
		return tokenbucket.NewRedisScriptStore(c, opts...)
	},
	"lock": func(c tokenbucket.RedisClient, opts ...tokenbucket.RedisOption) tokenbucket.Store {
		return tokenbucket.NewRedisStore(c, opts...)
	},
}

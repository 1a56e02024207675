package grpclimit_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/contrib/grpc"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// A gateway that calls an upstream no more than five times a second, all its instances together.
func Example() {
	store := tokenbucket.NewRedisScriptStore(redis.NewClient(&redis.Options{Addr: "localhost:6379"}))
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5, tokenbucket.WithStore(store))
	if err != nil {
		panic(err) // the configuration is wrong; the message names the field
	}
	limit, err := grpclimit.New(gate.One(limiter, 500*time.Millisecond)) // how long a call may wait
	if err != nil {
		panic(err)
	}
	conn, err := grpc.NewClient("fares:443",
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithChainUnaryInterceptor(limit.UnaryClient),
		grpc.WithChainStreamInterceptor(limit.StreamClient))
	if err != nil {
		panic(err)
	}
	defer conn.Close()

	_, err = healthpb.NewHealthClient(conn).Check(context.Background(), &healthpb.HealthCheckRequest{})
	if refusal := new(grpclimit.Error); errors.Is(err, grpclimit.ErrRefused) && errors.As(err, &refusal) {
		fmt.Println("not sent; worth another try in", refusal.RetryAfter)
	}
}

// A server that handles one call in a thousand seconds, and a client that reads when to come back.
func ExampleNew() {
	limiter, err := tokenbucket.NewSmoothBursty("checks", 0.001)
	if err != nil {
		panic(err)
	}
	limit, err := grpclimit.New(gate.One(limiter, 0))
	if err != nil {
		panic(err)
	}
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(limit.UnaryServer), grpc.ChainStreamInterceptor(limit.StreamServer))
	defer server.Stop()
	healthpb.RegisterHealthServer(server, health.NewServer())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	go func() { _ = server.Serve(listener) }()

	conn, err := grpc.NewClient(listener.Addr().String(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	for range 2 {
		_, err := healthpb.NewHealthClient(conn).Check(context.Background(), &healthpb.HealthCheckRequest{})
		fmt.Println(status.Code(err))
		for _, detail := range status.Convert(err).Details() {
			if info, ok := detail.(*errdetails.RetryInfo); ok {
				fmt.Println("in about", info.RetryDelay.AsDuration().Round(10*time.Second))
			}
		}
	}
	// Output:
	// OK
	// ResourceExhausted
	// in about 16m40s
}

// When Redis is away, calls pass unlimited, and somebody hears of it.
func ExampleWithOnError() {
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5)
	if err != nil {
		panic(err)
	}
	limit, err := grpclimit.New(gate.One(limiter, time.Second),
		grpclimit.WithOnError(func(_ context.Context, fullMethod string, err error) error {
			fmt.Println("not limited:", fullMethod, err)
			return nil
		}))
	fmt.Println(limit != nil, err)
	// Output: true <nil>
}

// A bucket for each tenant and method, as the caller's metadata has them.
func ExampleJoin() {
	limiter, err := tokenbucket.NewSmoothBursty("fares", 5)
	if err != nil {
		panic(err)
	}
	_, err = grpclimit.New(gate.One(limiter, time.Second), // a registry, more likely
		grpclimit.WithKey(grpclimit.Join(grpclimit.ByMetadata("x-tenant"), grpclimit.ByMethod)))
	fmt.Println(err)
	_, err = grpclimit.New(gate.One(limiter, time.Second), grpclimit.WithKey(grpclimit.ByMetadata("no such name")))
	fmt.Println(errors.Is(err, tokenbucket.ErrInvalidConfig))
	// Output:
	// <nil>
	// true
}

// The Go blocks of the README are these examples, so they compile and do what they say.
func TestReadme(t *testing.T) {
	readme, err := os.ReadFile("README.md")
	require.NoError(t, err)
	source, err := os.ReadFile("example_test.go")
	require.NoError(t, err)
	squeeze := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	blocks := strings.Split(string(readme), "```go\n")[1:]
	require.Len(t, blocks, 2)
	for _, part := range blocks {
		code, _, _ := strings.Cut(part, "```")
		require.Contains(t, squeeze(string(source)), squeeze(code))
	}
}

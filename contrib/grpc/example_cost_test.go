package grpclimit_test

import (
	"context"
	"fmt"

	"google.golang.org/grpc"
	pb "google.golang.org/grpc/interop/grpc_testing"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/contrib/grpc"
	"github.com/go-tokenbucket/tokenbucket/gate"
)

// Calls cost what their requests ask for. A server's interceptor would be an option of grpc.NewServer.
func ExampleWithCost() {
	bytes, err := tokenbucket.NewSmoothBursty("bytes", 1000, tokenbucket.WithInitialPermits(1000))
	if err != nil {
		panic(err)
	}
	limit, err := grpclimit.New(gate.One(bytes, 0), grpclimit.WithCost(func(_ context.Context, _ string, message any) int {
		if request, ok := message.(*pb.SimpleRequest); ok {
			return int(request.GetResponseSize())
		}
		return 1
	}))
	if err != nil {
		panic(err)
	}
	for _, size := range []int32{400, 500, 5000} {
		_, err := limit.UnaryServer(context.Background(), &pb.SimpleRequest{ResponseSize: size},
			&grpc.UnaryServerInfo{FullMethod: "/files.Files/Read"}, func(context.Context, any) (any, error) { return nil, nil })
		fmt.Println(size, err)
	}
	// Output:
	// 400 <nil>
	// 500 <nil>
	// 5000 grpclimit: /files.Files/Read: key "/files.Files/Read": gate: key "/files.Files/Read": cost 5000: tokenbucket: can never be granted: bucket "bytes": permits 5000: want a timeout of at least 4s
}

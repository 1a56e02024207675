// Package grpclimit holds gRPC calls to the limits of a fleet: interceptors that take a permit of a token bucket for
// each call, for clients that must not overrun an upstream and for servers that must not be overrun.
//
//	limit, err := grpclimit.New(gate)
//	conn, err := grpc.NewClient(target, grpc.WithChainUnaryInterceptor(limit.UnaryClient), grpc.WithChainStreamInterceptor(limit.StreamClient))
//	server := grpc.NewServer(grpc.ChainUnaryInterceptor(limit.UnaryServer), grpc.ChainStreamInterceptor(limit.StreamServer))
//
// A call waits until its permit is due, if the gate allows that long a wait; else it is refused at once, with the status
// ResourceExhausted and a google.rpc.RetryInfo that says when to try again. Clients also heed the RetryInfo of the
// upstream: the bucket is held back for the whole fleet.
package grpclimit

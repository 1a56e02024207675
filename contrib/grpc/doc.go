// Package grpclimit applies the limits of a fleet to gRPC calls. Its interceptors take a permit of a token bucket for each
// call, in clients that must not overload an upstream and in servers that must not be overloaded.
//
//	limit, err := grpclimit.New(gate)
//	conn, err := grpc.NewClient(target, grpc.WithChainUnaryInterceptor(limit.UnaryClient), grpc.WithChainStreamInterceptor(limit.StreamClient))
//	server := grpc.NewServer(grpc.ChainUnaryInterceptor(limit.UnaryServer), grpc.ChainStreamInterceptor(limit.StreamServer))
//
// A call waits until its permit is due, if the gate allows such a wait. Otherwise it is refused at once, with the status
// ResourceExhausted and a google.rpc.RetryInfo with the time of the next attempt. Clients also obey the RetryInfo of the
// upstream: it holds the bucket back for the whole fleet.
package grpclimit

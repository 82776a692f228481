"""The gRPC edge: services, interceptor, limits of memory and threads; the only room that imports grpc."""

"""The wire as the client sees it: the link, its gRPC implementation, and the diagnosis of connections."""

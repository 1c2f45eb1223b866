"""Sessions on a node: the gRPC service, streams in and out, a hop's work, replies."""

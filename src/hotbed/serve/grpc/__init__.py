"""The Open Inference Protocol over gRPC; see docs/server.md."""

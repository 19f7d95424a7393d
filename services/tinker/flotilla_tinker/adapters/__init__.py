"""The peers of the front door, over gRPC."""

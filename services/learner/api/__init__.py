"""The learner's gRPC services, and protobuf to and from its own types."""

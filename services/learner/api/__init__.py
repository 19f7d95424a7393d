"""gRPC services of the learner, and protobuf to and from its own types."""

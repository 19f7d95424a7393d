"""gRPC services of the learner, and conversion between protobuf and its own types."""

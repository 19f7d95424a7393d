"""SamplingService, and conversion between protobuf and this room's own types."""

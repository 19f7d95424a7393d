"""RolloutService, and conversion between protobuf and the rollout's own types."""

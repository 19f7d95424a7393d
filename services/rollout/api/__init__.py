"""RolloutService, and protobuf to and from the rollout's own types."""

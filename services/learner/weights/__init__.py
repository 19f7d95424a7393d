"""Publication of weights to rollouts."""

"""The rollout's table of a run spec."""

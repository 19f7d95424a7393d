"""Further machines of a learner: each runs ranks, and nothing else."""

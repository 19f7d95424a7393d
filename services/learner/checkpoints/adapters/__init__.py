"""The store of a run's checkpoints, by fsspec."""

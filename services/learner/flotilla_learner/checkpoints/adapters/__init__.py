"""Adapters to fsspec, which stores a run's checkpoints, and to the Hugging Face hub."""

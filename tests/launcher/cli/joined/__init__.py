"""A learner by name; `ranks.py` is what its further machines run."""

"""Readers of a run's files: they change nothing in a run but to hold what they show.

`attempts.py` lists attempts of a journal, `trajectory_export.py` writes episodes for training
elsewhere, and `inspector/` serves pages. The command line uses them, and no service does."""

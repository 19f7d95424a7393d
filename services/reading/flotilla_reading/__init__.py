"""Readers of a run's files, which change nothing in a run but to hold what they show, and of its
tasks before it starts.

`attempts.py` lists attempts of a journal, `trajectory_export.py` writes episodes for training
elsewhere, `inspector/` serves pages, and `data/` prepares tasks. The command line uses them, and no
service does."""

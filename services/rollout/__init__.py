"""Drives the engine through episodes. Read `work/worker.py`, then `episodes/episode.py`."""

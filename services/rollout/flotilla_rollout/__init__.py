"""Rollout workers: they drive the engine through episodes. Read `work/worker.py`, then
`episodes/episode.py`."""

"""Hands out groups, takes trajectories, trains, publishes weights. Read `run/train_loop.py`, then
`groups/dispatcher.py`."""

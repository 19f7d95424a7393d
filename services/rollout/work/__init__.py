"""The work of a rollout: leases become trajectories, and the newest weights go into the engine.

A reader starts at `worker.py`."""

"""From leases to trajectories, and the newest weights into the engine. A reader starts at
`worker.py`."""

"""Replicas as processes of this machine. `backend.py` starts and ends them, and finds orphans by
the marks of `marked_processes.py`."""

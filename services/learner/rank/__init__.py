"""One training rank, a process of its own; torch lives here. A reader starts at `worker.py` and
`step.py`."""

"""One training rank, a process of its own; torch lives here. Start reading at `worker.py` and
`step.py`."""

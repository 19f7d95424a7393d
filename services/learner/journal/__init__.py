"""The learner's durable state in one SQLite file; the run epoch fences every write. Start reading
at `store.py`."""

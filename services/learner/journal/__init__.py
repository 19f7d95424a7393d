"""What the learner must not forget, in one SQLite file; every write is fenced by the run epoch. A
reader starts at `store.py`."""

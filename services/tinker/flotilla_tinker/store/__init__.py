"""What the front door must not forget, in one SQLite file: sessions, models, samplers, checkpoints
and every order until its result was delivered. Start at `store.py`."""

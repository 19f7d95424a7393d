"""The verifiers' sandbox. `worker.py` and what it imports run inside; the rest starts and watches
it."""

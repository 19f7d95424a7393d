"""The verifiers' sandbox. `worker.py` and its imports run inside; the rest starts and watches
it."""

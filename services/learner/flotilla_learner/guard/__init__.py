"""Mismatch guard: engine against trainer. `mismatch_limits.py` is pure."""

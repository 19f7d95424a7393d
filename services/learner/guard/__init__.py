"""Mismatch guard: engine against trainer. `control_chart.py` is pure."""

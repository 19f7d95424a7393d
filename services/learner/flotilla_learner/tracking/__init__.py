"""Metrics of a step, and the trackers that log them. Every name is in docs/metrics.md. Start
reading at `step_metrics.py`."""

"""Carries orders out. Start at `desk.py`."""

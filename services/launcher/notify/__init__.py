"""Tells people what becomes of a run."""

"""Checkpoints: written, verified, uploaded, restored and exported."""

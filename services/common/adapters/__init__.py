"""Adapters that several services share: `model_hub.py`, by which models come to a machine."""

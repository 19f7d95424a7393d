"""Thousands of episodes through one gateway: start at `__main__.py`."""

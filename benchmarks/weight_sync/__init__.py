"""Cost of transferring new weights into engines; start at `__main__.py`."""

"""What new weights cost on their way into engines; start at `__main__.py`."""

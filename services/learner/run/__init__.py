"""The run as a list of steps. A reader starts at `train_loop.py`."""

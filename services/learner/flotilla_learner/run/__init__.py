"""The run as a list of steps. Start reading at `train_loop.py`."""

"""Why attempts fail: the analysis of a run's episodes. Start at `failure_classes.py`."""

"""The learner's tables of a run spec. Start reading at `learner.py`."""

"""`python -m flotilla_learner.training`: trains models step by step at callers' requests. Start
reading at `trained_models.py`."""

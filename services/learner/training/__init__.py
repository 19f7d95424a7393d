"""`python -m services.learner.training`: trains models step by step at callers' requests. Start
reading at `trained_models.py`."""

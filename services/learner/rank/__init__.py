"""One training rank from within: the process that holds a model and trains it; torch lives here.

What starts and calls it is `services.learner.ranks`. Start reading at `worker.py` and
`trainer.py`."""

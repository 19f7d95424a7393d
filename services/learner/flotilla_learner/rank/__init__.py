"""One training rank: the process that holds a model and trains it; torch lives here.

`flotilla_learner.ranks` starts and calls it. Start reading at `worker.py` and
`trainer.py`."""

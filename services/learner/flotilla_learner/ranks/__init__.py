"""The training ranks as seen by the service, which starts their processes and calls them.

A rank's own side is `flotilla_learner.rank`. `python -m flotilla_learner.ranks` offers another
machine to the learner, which reaches it through Ray (`cluster.py`). Start reading at
`local_ranks.py`."""

"""The training ranks as the service sees them: the side that starts processes and calls them.

A rank's own side is `services.learner.rank`. `python -m services.learner.ranks` offers a further
machine to the learner, which reaches it through Ray (`cluster.py`). Start reading at
`local_ranks.py`."""

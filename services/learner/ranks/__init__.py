"""The training ranks as the service sees them: the side that starts processes and calls them.

A rank's own side is `services.learner.rank`. `python -m services.learner.ranks` offers a further
machine to the learner. Start reading at `local_ranks.py`."""

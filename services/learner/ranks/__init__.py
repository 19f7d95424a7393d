"""The training ranks as the service sees them: processes here or on further machines.

`python -m services.learner.ranks` is such a machine. Start reading at `local.py`."""

"""Groups from the first lease to a batch. `dispatcher.py` joins `leases.py` (who holds what, and
until when), `batcher.py` (which groups make a step) and the journal."""

"""Groups from the first lease to a batch. `dispatcher.py` joins `leases.py` (who holds what, until
when), `batcher.py` (which groups make a step) and the journal."""

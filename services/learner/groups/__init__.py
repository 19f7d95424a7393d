"""Groups from the first lease to a batch: `dispatcher.py` joins the lease book and the journal."""

"""Control of runs, which keeps them as they are wanted. `reconcile.py` decides (pure),
`supervisor.py` loops, `replica_actions.py` acts."""

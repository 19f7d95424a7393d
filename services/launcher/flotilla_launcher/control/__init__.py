"""Control of runs: keeps each run in its wanted state. `supervisor.py` loops over a run,
`reconcile.py` decides the next actions, `transitions.py` and `restarts.py` define the effects of
events (all three pure), `replica_actions.py` acts."""

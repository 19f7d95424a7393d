"""Control of runs, which keeps them as they are wanted. `supervisor.py` loops over a run,
`reconcile.py` says what is to be done now, `transitions.py` and `restarts.py` what an event leads
to (all three pure), `replica_actions.py` acts."""

"""The agent of a rented machine, which runs and watches one replica there. `decisions.py` is pure;
`agent.py` acts: on exits, on the launcher's commands, and on the notices of a preemption.
What the launcher makes of a preemption is in `control/restarts.py`."""

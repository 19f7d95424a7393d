"""The agent of a rented machine, which runs and watches one replica there. `decisions.py` is
pure; `agent.py` acts."""

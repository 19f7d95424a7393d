"""Runs on a rented machine and watches over one replica there. `decisions.py` is pure; `agent.py`
acts."""

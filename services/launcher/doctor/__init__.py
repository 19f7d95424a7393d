"""Probes before a run: `probe_list.py` names them, `run_probes.py` runs them."""

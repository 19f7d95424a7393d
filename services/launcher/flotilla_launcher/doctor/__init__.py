"""Probes that run before a start: `probe_list.py` names them, `run_probes.py` runs them."""

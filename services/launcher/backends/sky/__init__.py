"""Replicas on machines that SkyPilot rents. `tasks.py` writes its documents, `backend.py` starts
them; only `sdk*.py`, `errors.py` and `cloud_audit.py` talk to vendors."""

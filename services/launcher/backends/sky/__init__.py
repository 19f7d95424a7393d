"""Backend for machines that SkyPilot rents. `backend.py` starts replicas there, `task_documents.py`
writes their task documents.

Only `sdk*.py`, `errors.py` and `cloud_audit.py` talk to vendors."""

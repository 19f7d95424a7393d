"""Backend for machines that SkyPilot rents. `backend.py` starts replicas there, `task_documents.py`
writes their task documents.

`orphan_names.py` identifies orphans by the names of inactive runs, `orphan_machines.py` finds those
that a cloud bills and SkyPilot does not know; `machines_gone.py` ends the former,
`cloud_audit.py` the latter.

Only `sdk*.py`, `errors.py` and `cloud_audit.py` talk to vendors."""

"""Backend for machines that SkyPilot rents. `backend.py` starts replicas there, `task_documents.py`
writes their task documents.

Which machines are orphans say `orphan_names.py` (those of no active run, by their names) and
`orphan_machines.py` (those that a cloud bills and SkyPilot does not know); `cleanup.py` ends the
former, `cloud_audit.py` the latter.

Only `sdk*.py`, `errors.py` and `cloud_audit.py` talk to vendors."""

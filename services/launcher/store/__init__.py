"""The launcher's ledger in SQLite, the roster of who serves where, and the logs of replicas."""

"""The launcher's ledger in SQLite, the roster of serving replicas, and their logs."""

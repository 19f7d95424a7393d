"""Episodes from open to close. `gateway.py` is the core; `leases.py` is pure."""

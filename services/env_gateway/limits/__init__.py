"""Limits on the load of an environment: concurrent calls (`adaptive_concurrency.py`), pauses after
failures (`circuit_breaker.py`), rates (`rate_gates.py`), order (`fair_queue.py`), the gates at
which calls wait (`capacity_gates.py`), and the waits before a retry (`backoff.py`)."""

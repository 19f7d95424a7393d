"""Limits on the load of an environment: concurrent calls (`adaptive_concurrency.py`), pauses after
failures (`circuit_breaker.py`), rates, fixed (`token_bucket.py`) and by what is refused
(`refusal_pace.py`), shares of environments (`shared_places.py`), order (`fair_queue.py`), the gates
at which requests wait (`request_gates.py`, `rate_gates.py`), and the waits before a retry
(`backoff.py`)."""

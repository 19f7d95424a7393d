"""Limits on the load of an environment: how many calls it bears (`adaptive_concurrency.py`), when
it gets none (`circuit_breaker.py`), how often (`token_bucket.py`), who is next (`fair_queue.py`),
the gates at which calls wait (`capacity_gates.py`), and the waits before a failed request to it
is repeated (`backoff.py`)."""

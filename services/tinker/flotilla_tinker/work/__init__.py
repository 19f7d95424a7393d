"""Carries clients' orders out: in the order of their numbers within a model, with fair shares
between tenants, and exactly once whatever process dies. Start at `desk.py`."""

"""Notifications about runs: `messages.py` writes them, `outbox.py` keeps them, `delivery.py`
sends them."""

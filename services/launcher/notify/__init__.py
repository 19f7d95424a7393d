"""Tells people about runs: `messages.py` writes, `outbox.py` keeps, `delivery.py` sends."""

"""Notifications about runs: `notifier.py` decides which events become messages, `messages.py`
writes them, `outbox.py` keeps them, `delivery.py` sends them. Equal alarms are folded where they
are raised, in the learner."""

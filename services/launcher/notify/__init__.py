"""Notifications about runs: `messages.py` writes them, `outbox.py` keeps them, `delivery.py` sends
them. Equal alarms are folded where they are raised, in the learner."""

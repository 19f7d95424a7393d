"""Notifications about runs: `message_selection.py` selects the messages from events, `messages.py`
writes them, `notifier.py` puts them into the outbox, `outbox.py` keeps them, `delivery.py` sends
them. The learner folds equal alarms where it raises them."""

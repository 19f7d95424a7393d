"""Notifications about runs: `notifier.py` selects the events that matter to people, `messages.py`
writes the messages (`state_messages` decides which changes of state get one), `outbox.py` keeps
them, `delivery.py` sends them. The learner folds equal alarms where it raises them."""

"""Notifications about runs: `notifier.py` takes the events that people may want to know of,
`messages.py` writes the messages (its `state_messages` decides which changes of state get none),
`outbox.py` keeps them, `delivery.py` sends them. Equal alarms are folded where they
are raised, in the learner."""

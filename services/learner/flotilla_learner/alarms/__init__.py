"""Alarms for people: rules over steps, tasks and events, each alarm raised once. Start reading at
`alarms.py`."""

"""Logs, metrics and traces of a service, and the watchdog of its event loop."""

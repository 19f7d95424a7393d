"""Sinks of messages: Slack, or any webhook."""

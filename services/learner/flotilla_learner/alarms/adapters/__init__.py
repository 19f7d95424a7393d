"""Destinations of alarms other than the log."""

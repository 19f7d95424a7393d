"""Where alarms go besides the log."""

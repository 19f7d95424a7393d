"""Where messages go: Slack, or any webhook."""

"""EpisodeService, and the gateway's status, metrics and alarms."""

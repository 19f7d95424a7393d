"""EpisodeService, and what the gateway shows of itself: status, metrics, alarms."""

"""Publishes weights to rollouts."""

"""Adapters by which other machines reach the learner."""

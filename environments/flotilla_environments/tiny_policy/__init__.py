"""Builds the policy of the demo: a small language model that can partly use tools."""

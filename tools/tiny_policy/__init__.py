"""Builds the policy of the demo: a small language model that half knows how to use tools."""

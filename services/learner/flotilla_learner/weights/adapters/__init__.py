"""Weights over torch: the sender into live engines, a process of its own."""

"""Weights on their way to engines, without torch: fingerprints, deltas, shared memory, the
addresses of a transfer."""

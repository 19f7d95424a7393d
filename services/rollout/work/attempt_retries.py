"""Pauses between the tries of one attempt."""

import random


def choose_pause(first_s: float, failures: int) -> float:
    """Return the seconds to pause after so many failed tries: doubled after each, with jitter, so
    that attempts that failed together do not retry together."""
    return first_s * 2 ** (failures - 1) * random.uniform(0.5, 1.0)

"""Sampling seeds of attempts: a repeated try gets the same seed."""

import hashlib


def attempt_seed(seed: int, group_id: str, attempt_index: int, attempt_try: int) -> int:
    """Return 63 bits that depend only on the run's seed and the try."""
    text = f"{seed}/{group_id}/{attempt_index}/{attempt_try}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1

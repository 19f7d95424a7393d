"""Sampling seeds of attempts: a repeated try gets the same one."""

import hashlib


def attempt_seed(seed: int, group_id: str, attempt_index: int, attempt_try: int) -> int:
    """Return 63 bits, a function of the run's seed and the try alone."""
    text = f"{seed}/{group_id}/{attempt_index}/{attempt_try}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1

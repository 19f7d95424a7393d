"""The canary: tokens that engine and trainer score at each publication; no torch."""

import numpy as np

CANARY_TOKENS = 32


def canary_token_ids(vocab_size: int) -> np.ndarray:
    """Return token ids [32] int32, spread over the vocabulary; a function of its size."""
    golden = 0.6180339887498949
    spots = (np.arange(1, CANARY_TOKENS + 1, dtype=np.float64) * golden) % 1.0
    return (spots * vocab_size).astype(np.int32)

"""Files of random demonstrations."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.episodes.demonstrations import (
    Demonstration,
    DemonstrationHead,
    write_demonstrations,
)
from tests.support.learner import TOKENIZER


def make_demonstrations(
    count: int, *, tasks: int = 5, vocabulary: int = 64, seed: int = 0
) -> list[Demonstration]:
    """Sequences of 8 to 23 tokens with two turns of a policy, one an episode."""
    chooser = np.random.default_rng(seed)
    found: list[Demonstration] = []
    for number in range(count):
        length = int(chooser.integers(8, 24))
        trained = np.zeros(length, np.bool_)
        trained[3:5] = True
        trained[6 : length - 1] = True
        found.append(
            Demonstration(
                *("run", AttemptKey(f"g{number:06d}r0", number % 3, 0)),
                *(f"task-{number % tasks}", 1.0),
                *(chooser.integers(0, vocabulary, length).astype(np.int32), trained),
            )
        )
    return found


def write_file(
    path: Path, sequences: Sequence[Demonstration], tokenizer: bytes = TOKENIZER
) -> Path:
    head = DemonstrationHead("run", tokenizer.hex(), {}, {"sequences": len(sequences)})
    write_demonstrations(path, head, sequences)
    return path

"""Authors of a sequence's tokens, and the mask of those that a policy wrote: the trained ones."""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.policy import PolicyId


class Author(StrEnum):
    """Author of a run of tokens."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENVIRONMENT = "environment"
    # Inserted into a policy's turn, such as the end of thinking over its budget: not sampled.
    FORCED = "forced"


# Authors of the tokens of a policy's turn.
TURN_AUTHORS = (Author.POLICY, Author.FORCED)


# A trajectory has dozens of these: a tuple costs half as much as a frozen dataclass.
class Span(NamedTuple):
    """A run of tokens with one author and, if a policy wrote it, one policy."""

    author: Author
    length: int
    policy: PolicyId | None = None
    temperature: float | None = None


def policy_mask(spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Return the mask that is True on the tokens that a policy wrote, shape [tokens]."""
    # Python 3.11 looks up an enum member on each access.
    policy = Author.POLICY
    by_policy = [span.author is policy for span in spans]
    lengths = [span.length for span in spans]
    return np.repeat(np.array(by_policy, dtype=np.bool_), lengths)

"""Ranges of the numbers of a configuration.

Each number has a lower and an upper bound: a value outside is a typing error, and is reported
before anything starts."""

from typing import Annotated

from pydantic import Field

MOST_STEPS = 10_000_000
MOST_TOKENS = 1_000_000_000
# Tokens that one is sampled from: 256 bytes of it, where its id and logprob are 8.
MOST_CANDIDATES = 64

# A wait or a lifetime: above 0, at most a week.
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
# Counts: processes, episodes, tries.
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
# Optimizer steps or policy versions.
Steps = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Share = Annotated[float, Field(ge=0, le=1)]

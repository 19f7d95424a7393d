"""The experts of an attempt's tokens are gathered over its requests: the first answer counts."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.token_authors import Author
from flotilla_common.images.picture import ShownPicture
from flotilla_rollout.adapters.fake import FakeEngine
from flotilla_rollout.episodes.episode import AttemptRunner
from flotilla_rollout.types import Completion, Sampling
from tests.support.rollout import (
    POLICY,
    FakeEnvironment,
    attempt,
    dialect,
    limits,
    tokenizer,
    turns,
)

LOOK = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'


class Naming(FakeEngine):
    """Reports the request that computed each token; the second request reports nothing."""

    requested: list[tuple[int, int]]

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        self.requested.append((sampling.experts_from, len(token_ids)))
        written = await super().generate(token_ids, sampling, max_tokens, timeout_s, pictures)
        computed = len(token_ids) + len(written.token_ids) - 1 - sampling.experts_from
        rows = np.full((computed, 2, 2), len(self.requested), np.uint8)
        return replace(written, experts=None if len(self.requested) == 2 else rows)


async def test_each_request_names_what_no_earlier_one_has_named() -> None:
    script = turns(LOOK, LOOK, LOOK, "It is 1. <done>")
    engine = Naming(tokenizer(), dialect().stop_ids[0], script, policy=POLICY)
    engine.requested = []
    runner = AttemptRunner(engine, FakeEnvironment(), tokenizer(), dialect(), limits())
    trajectory = await runner.run_attempt(attempt())
    [sequence] = trajectory.sequences
    experts = sequence.experts
    assert experts is not None
    ends = np.cumsum([span.length for span in sequence.spans])
    written = [
        int(end)
        for end, span in zip(ends, sequence.spans, strict=True)
        if span.author is Author.POLICY
    ]
    # The last token of a turn is read with the text after it.
    first, _, third, fourth = (end - 1 for end in written)
    assert [begin for begin, _ in engine.requested] == [0, first, first, third]
    assert len(experts) == fourth == len(sequence.token_ids) - 1
    expected = np.repeat([1, 3, 4], [first, third - first, fourth - third])
    np.testing.assert_array_equal(experts[:, 0, 0], expected)

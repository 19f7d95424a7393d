"""A thinking over its budget is ended for the policy, by tokens that nobody trains on."""

from math import inf

import numpy as np
import pytest
from numpy.typing import NDArray

from services.common.domain.policy import PolicyId
from services.common.domain.trajectory import Author
from services.rollout.episodes.thinking_budget import ThinkingBudget
from services.rollout.episodes.transcript import Transcript
from services.rollout.types import Completion, PolicySpan, Sampling

POLICY = PolicyId(1, 1, b"f" * 32)
CLOSE, END, WORD = 90, 91, 7
FORCED = [80, CLOSE, 81]
PROMPT = np.array([1, 2, 3], np.int32)


class ScriptedEngine:
    """Writes the ids of a script on, from where what it is shown leaves off."""

    def __init__(self, script: list[int], *, timed_out: bool = False) -> None:
        self.script = script
        self.timed_out = timed_out
        self.shown: list[list[int]] = []

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
    ) -> Completion:
        self.shown.append(token_ids.tolist())
        written = self.script[:max_tokens]
        self.script = self.script[max_tokens:]
        return Completion(
            np.array(written, np.int32),
            np.full(len(written), -0.5, np.float32),
            (PolicySpan(POLICY, len(written)),),
            cut=bool(self.script) or written[-1:] != [END],
            timed_out=self.timed_out,
        )


def budget_of(engine: ScriptedEngine, budget: int) -> ThinkingBudget:
    return ThinkingBudget(engine, budget, FORCED, lambda ids: CLOSE not in ids)


def spans_of(completion: Completion) -> list[tuple[Author, int]]:
    transcript = Transcript([1])
    transcript.add_completion(completion, 1.0)
    assert len(transcript.logprobs) == sum(
        span.length for span in transcript.spans if span.author is Author.POLICY
    )
    return [(span.author, span.length) for span in transcript.spans[1:]]


async def test_a_thinking_over_its_budget_is_ended_and_the_turn_goes_on() -> None:
    engine = ScriptedEngine([WORD] * 6 + [END])
    turn = await budget_of(engine, 4).generate(PROMPT, Sampling(1.0), 50)
    assert turn.token_ids.tolist() == [WORD] * 4 + FORCED + [WORD] * 2 + [END]
    assert spans_of(turn) == [(Author.POLICY, 4), (Author.FORCED, 3), (Author.POLICY, 3)]
    assert engine.shown[1] == [1, 2, 3, *[WORD] * 4, *FORCED], "the policy reads the forced end"
    assert not turn.cut


async def test_a_thinking_within_its_budget_is_left_alone() -> None:
    engine = ScriptedEngine([WORD, CLOSE, WORD, WORD, WORD, WORD, END])
    turn = await budget_of(engine, 4).generate(PROMPT, Sampling(1.0), 50)
    assert turn.token_ids.tolist() == [WORD, CLOSE, WORD, WORD, WORD, WORD, END]
    assert spans_of(turn) == [(Author.POLICY, 4), (Author.POLICY, 3)]


async def test_a_short_turn_is_one_request() -> None:
    engine = ScriptedEngine([WORD, END])
    turn = await budget_of(engine, 4).generate(PROMPT, Sampling(1.0), 50)
    assert turn.token_ids.tolist() == [WORD, END]
    assert len(engine.shown) == 1


@pytest.mark.parametrize("most", [3, 4, 5, 7, 8])
async def test_no_turn_is_longer_than_it_may_be(most: int) -> None:
    engine = ScriptedEngine([WORD] * 20 + [END])
    turn = await budget_of(engine, 4).generate(PROMPT, Sampling(1.0), most)
    assert len(turn.token_ids) == most
    assert turn.cut


async def test_a_turn_that_ran_out_of_time_is_handed_back_as_it_is() -> None:
    engine = ScriptedEngine([WORD] * 20, timed_out=True)
    turn = await budget_of(engine, 4).generate(PROMPT, Sampling(1.0), 50, 0.1)
    assert turn.timed_out
    assert spans_of(turn) == [(Author.POLICY, 4)]

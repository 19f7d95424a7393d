"""A thinking over its budget is ended for the policy, by tokens that are not trained on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import AddedToken

from flotilla_common.domain.attempts import StopReason
from flotilla_common.domain.token_authors import Author, policy_mask
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.images.picture import ShownPicture
from flotilla_common.rpc.errors import ConfigError
from flotilla_environments.tiny_policy.tokenizer import train_tokenizer
from flotilla_rollout.adapters.fake import FakeEngine
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.episodes.episode import AttemptRunner
from flotilla_rollout.types import Completion, Sampling
from tests.support.rollout import POLICY, FakeEnvironment, attempt, dialect, limits, tokenizer

LOOK = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
BUDGET = 12


@pytest.fixture(scope="module")
def thinker() -> TransformersTokenizer:
    """The tokenizer of the other tests, with tokens around a thinking."""
    made = train_tokenizer(["system user assistant Tools look at name arguments it found"] * 3, 300)
    made.add_tokens([AddedToken(mark, special=False) for mark in ("<think>", "</think>")])
    return TransformersTokenizer(made)


class GoesOn(FakeEngine):
    """Writes a script on, from where what it is shown leaves off; what was put in between is
    read over. Each token is the only one that it was sampled from, and one a request is mended."""

    requests: list[int]

    async def generate(
        self,
        token_ids: NDArray[np.int32],
        sampling: Sampling,
        max_tokens: int,
        timeout_s: float = inf,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        self.requests.append(max_tokens)
        written = await super().generate(token_ids, sampling, max_tokens, timeout_s, pictures)
        return replace(written, candidates=written.token_ids[:, None], mended=1)


async def play(
    thinker: TransformersTokenizer, write: Callable[[str], str], **changes: int
) -> tuple[Trajectory, list[int], FakeEnvironment]:
    chosen = TemplateDialect(thinker)
    engine = GoesOn(thinker, chosen.stop_ids[0], write, policy=POLICY)
    engine.requests = []
    environment = FakeEnvironment()
    bounds = limits(thinking_tokens=BUDGET, **changes)
    runner = AttemptRunner(engine, environment, thinker, chosen, bounds)
    trajectory = await runner.run_attempt(attempt())
    assert trajectory.is_graded
    sequence = trajectory.sequences[0]
    assert policy_mask(sequence.spans).sum() == len(sequence.logprobs), "nothing else carries any"
    return trajectory, engine.requests, environment


def turn_of(shown: str) -> str:
    """Return the written part of the turn."""
    return shown.rpartition("<|im_start|>assistant\n")[2]


def ponder(shown: str) -> str:
    """Think for ever, until the thinking is over; then call, and then answer."""
    if "tool_response" in shown:
        return "It is 1. <done>"
    return LOOK if "</think>" in turn_of(shown) else "<think>" + "look at it " * 100


async def test_a_thinking_over_its_budget_is_ended_and_its_turn_continues(
    thinker: TransformersTokenizer,
) -> None:
    trajectory, requests, environment = await play(thinker, ponder)
    assert trajectory.stop_reason is StopReason.DONE
    assert environment.episodes[0].calls == [("look", '{"at": "it"}')]
    authors = [(span.author, span.length) for span in trajectory.spans[1:4]]
    end = TemplateDialect(thinker).thinking.end_ids
    assert authors[:2] == [(Author.POLICY, BUDGET), (Author.FORCED, len(end))]
    assert authors[2][0] is Author.POLICY, "the turn continues"
    turn = trajectory.turns[0]
    assert turn.thinking_tokens == BUDGET + end.index(thinker.encode("</think>")[0]) + 1
    assert turn.generated_tokens == sum(length for _, length in authors)
    assert trajectory.counts.turns == 2
    assert requests[0] == BUDGET


async def test_candidates_are_those_of_the_sampled_tokens_alone(
    thinker: TransformersTokenizer,
) -> None:
    trajectory, requests, _ = await play(thinker, ponder)
    (sequence,) = trajectory.sequences
    sampled = sequence.token_ids[policy_mask(sequence.spans)]
    assert any(span.author is Author.FORCED for span in sequence.spans)
    assert sequence.candidates is not None
    assert sequence.candidates.tolist() == sampled[:, None].tolist()
    assert trajectory.counts.mended_candidates == len(requests) == 3


async def test_what_was_put_in_stands_in_the_tokens_and_has_no_gradient(
    thinker: TransformersTokenizer,
) -> None:
    trajectory, _, _ = await play(thinker, ponder)
    sequence = trajectory.sequences[0]
    text = thinker.decode(sequence.token_ids.tolist())
    assert f"\n</think>\n\n{LOOK}<|im_end|>" in text
    trained = thinker.decode(sequence.token_ids[policy_mask(sequence.spans)].tolist())
    assert "</think>" not in trained


async def test_a_turn_that_thinks_less_is_left_alone(thinker: TransformersTokenizer) -> None:
    def write(shown: str) -> str:
        return f"<think>it</think>{LOOK}" if "tool_response" not in shown else "It is 1. <done>"

    trajectory, requests, _ = await play(thinker, write)
    assert all(span.author is not Author.FORCED for span in trajectory.spans)
    assert trajectory.stop_reason is StopReason.DONE
    assert requests[0] == BUDGET


async def test_a_turn_is_no_longer_than_it_may_be_for_all_that_is_put_in(
    thinker: TransformersTokenizer,
) -> None:
    for most in (BUDGET - 1, BUDGET, BUDGET + 1, BUDGET + 2, BUDGET + 9):
        trajectory, _, _ = await play(thinker, ponder, max_generate_length=most)
        assert trajectory.turns[0].generated_tokens <= most
        assert trajectory.stop_reason is StopReason.GENERATION_LENGTH


def test_a_vocabulary_without_a_mark_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.limits\.thinking_tokens: .* no token that"):
        AttemptRunner(
            FakeEngine.__new__(FakeEngine),
            FakeEnvironment(),
            tokenizer(),
            dialect(),
            limits(thinking_tokens=4),
        )

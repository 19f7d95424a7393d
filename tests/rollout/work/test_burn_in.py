"""The engine is tried at the greatest lengths once, before the first lease, and what fails there
names the key to change."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

from flotilla_common.images.picture import ShownPicture
from flotilla_common.images.placeholders import check_places
from flotilla_common.images.vision_family import VisionFamily
from flotilla_common.process.process_memory import peak_memory_bytes
from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.adapters.fake import FakeEngine
from flotilla_rollout.config.rollout import RolloutConfig
from flotilla_rollout.ports import EngineDead, EngineError
from flotilla_rollout.types import Completion, MemoryPeak
from flotilla_rollout.work.burn_in import BurnIn, end_with_picture
from tests.support.rollout import POLICY, engine, tokenizer, turns
from tests.support.vision_family import make_family

FIRST = replace(POLICY, version=0)


class TriedEngine(FakeEngine):
    """Remembers its request; answers with `reach` tokens at most, or raises `fails`."""

    reach = 10**6
    fails: EngineError | None = None

    async def burn_in(
        self,
        token_ids: NDArray[np.int32],
        max_tokens: int,
        timeout_s: float,
        pictures: Sequence[ShownPicture] = (),
    ) -> Completion:
        self.request = (token_ids, max_tokens, timeout_s)
        self.pictures = pictures
        if self.fails is not None:
            raise self.fails
        return await super().burn_in(token_ids, min(max_tokens, self.reach), timeout_s)

    async def measure_memory(self) -> Sequence[MemoryPeak]:
        return [MemoryPeak(2**30), MemoryPeak(2**31, 3 * 2**30, 2**33)]


def config(**changes: Any) -> RolloutConfig:
    return RolloutConfig.model_validate(
        {"max_input_length": 60, "max_generate_length": 16, "engine": {"device": "cuda"}} | changes
    )


def trial(
    settled: asyncio.Event, given: RolloutConfig, family: VisionFamily | None = None
) -> tuple[BurnIn, TriedEngine]:
    tried = engine(turns("x"))
    tried.__class__ = TriedEngine
    assert isinstance(tried, TriedEngine)
    tried.policy = FIRST
    lengths, draw = given.burn_in_lengths(64), tokenizer().draw_ordinary
    return BurnIn(tried, lengths, given.burn_in_hints, draw, settled.wait, family), tried


async def passed(
    given: RolloutConfig, family: VisionFamily | None = None
) -> tuple[BurnIn, TriedEngine]:
    settled = asyncio.Event()
    settled.set()
    burn_in, tried = trial(settled, given, family)
    await burn_in.run_once()
    return burn_in, tried


async def refused(given: RolloutConfig, **flaws: Any) -> str:
    settled = asyncio.Event()
    settled.set()
    burn_in, tried = trial(settled, given)
    for name, value in flaws.items():
        setattr(tried, name, value)
    with pytest.raises(ConfigError) as caught:
        await burn_in.run_once()
    assert not burn_in.over
    return str(caught.value)


async def test_it_waits_for_the_first_weights_and_then_goes_to_the_last_position() -> None:
    settled = asyncio.Event()
    burn_in, tried = trial(settled, config())
    running = asyncio.create_task(burn_in.run_once())
    await asyncio.sleep(0.01)
    assert not hasattr(tried, "request")
    settled.set()
    with capture_logs() as logs:
        await running
    prompt, answer, timeout_s = tried.request
    assert (len(prompt), answer, timeout_s) == (48, 16, 600.0)
    assert burn_in.over
    (line,) = [each for each in logs if each["event"] == "burn-in passed"]
    assert (line["engine_peak_gib"], line["gpu_peak_gib"], line["gpu_gib"]) == ([1, 2], [3], [8])
    reported = burn_in.metrics
    assert reported["engine_peak_memory_bytes"] == 3 * 2**30
    assert reported["engine_peak_gpu_bytes"] == 3 * 2**30
    assert 2**25 < reported["peak_memory_bytes"] <= peak_memory_bytes()


def test_its_prompt_has_no_token_that_structures_a_conversation() -> None:
    words = tokenizer()
    drawn = words.draw_ordinary(5000)
    assert len(np.unique(drawn)) > 100
    assert not any(token in words.decode(drawn.tolist()) for token in words.added_tokens)
    assert drawn.tolist() == words.draw_ordinary(5000).tolist()


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({}, (48, 16)),
        # No turn begins behind a longer input.
        ({"max_input_length": 30}, (30, 16)),
        # But a turn that continues does.
        ({"max_input_length": 30, "limits": {"on_cut": "continue"}}, (48, 16)),
        ({"max_generate_length": 500}, (1, 63)),
        ({"burn_in": {"answer_tokens": 2}}, (60, 2)),
        ({"burn_in": {"answer_tokens": 99}}, (48, 16)),
    ],
)
def test_prompt_and_answer_are_the_longest_that_an_attempt_may_have(
    changes: dict[str, Any], lengths: tuple[int, int]
) -> None:
    found = config(**changes).burn_in_lengths(64)
    assert found is not None
    assert (found.prompt, found.answer) == lengths


async def test_one_that_is_switched_off_tries_nothing() -> None:
    burn_in, tried = await passed(config(burn_in={"enabled": False}))
    assert burn_in.over
    assert not hasattr(tried, "request")
    assert burn_in.metrics == {}


async def test_a_policy_that_sees_is_tried_with_a_picture_in_a_prompt_of_the_same_length() -> None:
    family = make_family((300, 301, 302, 303))
    _, tried = await passed(config(), family)
    prompt, pictures = tried.request[0], tried.pictures
    assert len(prompt) == 48
    check_places(prompt, [each.place for each in pictures], family)
    assert [family.count(each.place.grid) for each in pictures] == [36]


@pytest.mark.parametrize(
    ("length", "most_pixels", "tokens"),
    [
        *((3, 2**24, []), (4, 2**24, [1]), (6, 2**24, [1]), (7, 2**24, [4])),
        # A larger one would be scaled down.
        (500, 32 * 32 * 20, [16]),
    ],
)
def test_the_picture_is_the_largest_for_which_the_prompt_has_room(
    length: int, most_pixels: int, tokens: list[int]
) -> None:
    family = make_family((300, 301, 302, 303), most_pixels)
    ids, pictures = end_with_picture(np.zeros(length, np.int32), family)
    assert len(ids) == length
    check_places(ids, [each.place for each in pictures], family)
    assert [family.count(each.place.grid) for each in pictures] == tokens


async def test_a_death_of_the_engine_names_the_share_of_the_gpu() -> None:
    message = await refused(config(), fails=EngineDead("it has ended"))
    assert message == (
        "the burn-in (a prompt of 48 tokens and an answer of 16) ended the engine: it has ended;"
        " lower rollout.engine.gpu_memory_utilization (0.9), or policy.max_model_len"
    )
    message = await refused(config(engine={"device": "cpu"}), fails=EngineDead("it has ended"))
    assert message.endswith("; lower policy.max_model_len, or give the machine more memory")


async def test_an_answer_that_time_cuts_names_the_time_and_the_length() -> None:
    message = await refused(config(burn_in={"timeout_s": 5}), reach=3)
    assert message.endswith(
        "is not over after 5 s, with 3 tokens sampled; raise rollout.burn_in.timeout_s (5), or"
        " lower rollout.max_generate_length (16)"
    )


async def test_an_answer_that_cannot_be_used_is_reported_in_the_engines_words() -> None:
    message = await refused(config(), fails=EngineError("a logprob that is no number"))
    assert message.endswith("failed: a logprob that is no number")


async def test_an_engine_that_dies_under_later_weights_may_be_replaced() -> None:
    settled = asyncio.Event()
    settled.set()
    burn_in, tried = trial(settled, config())
    tried.policy, tried.fails = POLICY, EngineDead("it has ended")
    assert POLICY.version > 0
    with pytest.raises(EngineDead, match="it has ended"):
        await burn_in.run_once()
    # Nor does the burn-in fail if an engine dies later.
    tried.policy = FIRST
    assert isinstance(burn_in.explain_death("later"), EngineDead)

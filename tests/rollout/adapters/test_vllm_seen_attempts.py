"""Whole attempts on screens with real vLLM: from what is recorded, another implementation of the
model computes the same logprobs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flotilla_common.domain.attempts import StopReason, ToolOutcome
from flotilla_common.domain.token_authors import policy_mask
from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.images.picture import Picture, PlacedPicture, ShownPicture
from flotilla_common.images.picture_files import read_picture
from flotilla_common.images.pixels import PixelReader
from flotilla_common.images.vision_family import VisionFamily, load_vision_family
from flotilla_common.spec.spec import PolicyConfig, VisionConfig
from flotilla_rollout.adapters.tokenizer import load_tokenizer
from flotilla_rollout.adapters.vllm import VllmEngine
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.dialects.full import FullDialect
from flotilla_rollout.dialects.turns import ToolCall, Turn
from flotilla_rollout.episodes.episode import AttemptRunner
from flotilla_rollout.types import Sampling, Tool, ToolResult
from tests.rollout.adapters.tiny_engines import TOLERANCE, tiny_config
from tests.support.rollout import FACTS, FakeEnvironment, FakeEpisode, attempt, limits
from tests.support.tiny_model import publish
from tests.support.vision_models import (
    draw_picture,
    load_vision_model,
    vision_inputs,
    vision_logprobs,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(280),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]
PAD = "<|image_pad|>"
TURNS = 3


class CallingDialect(FullDialect):
    """Reads every turn as a call: what a random policy writes is none."""

    def parse_turn(
        self,
        prompt_ids: NDArray[np.int32],
        completion_ids: Sequence[int],
        tools: Sequence[Tool],
    ) -> Turn:
        return Turn((ToolCall("look", "{}"),), False, "")


class ScreenEpisode(FakeEpisode):
    """Begins with a screen, and shows another after every call."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.info = replace(self.info, facts=replace(FACTS, pictures=(draw_picture(0),)))

    async def call_tool(self, name: str, arguments_json: str, timeout_s: float) -> ToolResult:
        self.calls.append((name, arguments_json))
        width = 84 + 40 * len(self.calls)
        return ToolResult(ToolOutcome.OK, ("seen", draw_picture(len(self.calls), width)))


def shown_in(trajectory: Trajectory) -> list[ShownPicture]:
    """Return the pictures of a trajectory by what it records alone."""
    shown = list[ShownPicture]()
    for item in trajectory.sequences[0].pictures:
        picture: Picture = read_picture(trajectory.pictures[item.sha256])
        time, high, wide = item.grid
        place = PlacedPicture(item.sha256, (time, high, wide), item.token_offset)
        shown.append(ShownPicture(picture, place))
    return shown


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
async def test_recorded_attempts_have_the_logprobs_of_what_was_seen(
    vision_folder: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    folder, vision = vision_folder(kind), VisionConfig(tower="trained", projector="trained")
    policy = PolicyConfig(model=str(folder), dtype="float32", max_model_len=2048, vision=vision)
    family, tokenizer = load_vision_family(folder, vision), load_tokenizer(folder)
    dialect = CallingDialect(tokenizer, pad=PAD)
    served = ServedModel(folder, policy, dialect.stop_ids)
    engine = await VllmEngine.start_engine(tiny_config(), served)
    try:
        model = load_vision_model(folder)
        update = publish(model, tmp_path / "weights.safetensors", 1)
        await engine.load_weights(update, Path(update.location))
        bounds = limits(
            max_turns=TURNS, max_generate_length=24, max_images=8, attempt_timeout_s=120.0
        )
        environment = FakeEnvironment(episode=ScreenEpisode)
        runner = AttemptRunner(engine, environment, tokenizer, dialect, bounds, family=family)
        for seed in range(3):
            played = await runner.run_attempt(replace(attempt(), sampling=Sampling(1.0, seed)))
            assert (played.detail, played.stop_reason) == ("", StopReason.MAX_TURNS)
            check_trained_tokens(played, family, PixelReader(folder, family), model)
    finally:
        await engine.close()


def check_trained_tokens(
    played: Trajectory, family: VisionFamily, reader: PixelReader, model: Any
) -> None:
    [sequence] = played.sequences
    # The last call's screen is not seen any more.
    shown = shown_in(played)
    assert [each.picture.width for each in shown] == [84, 124, 164]
    inputs = vision_inputs(sequence.token_ids, shown, family, reader)
    expected = vision_logprobs(model, inputs, banned=family.banned_ids)
    expected = expected[policy_mask(sequence.spans)[1:]]
    assert len(sequence.logprobs) == len(expected) > TURNS
    assert np.abs(sequence.logprobs - expected).max() < TOLERANCE

"""Real vLLM on tiny random vision models: they see pictures as in transformers, by the weights that
are served.

One engine of each kind serves its tests, in their order."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from services.common.images.picture import PlacedPicture, ShownPicture
from services.common.images.pixels import PixelReader, Pixels
from services.common.images.vision_family import VisionFamily, load_vision_family
from services.common.spec.spec import PolicyConfig, VisionConfig
from services.rollout.adapters.vllm import VllmEngine
from services.rollout.adapters.vllm_options import ServedModel
from services.rollout.adapters.vllm_pictures import EnginePictures, read_pictures
from services.rollout.ports import EngineError
from services.rollout.types import Completion, Sampling
from tests.rollout.adapters.tiny_engines import NEVER, TOLERANCE, tiny_config
from tests.support.loop_watch import watched_loop
from tests.support.tiny_model import perturbed, publish
from tests.support.vision_models import (
    draw_picture,
    load_vision_model,
    show_pictures,
    vision_inputs,
    vision_logprobs,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engine,
    pytest.mark.timeout(280),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

# The most that a picture may hold the event loop.
STALL_S = 0.05
SCREEN = (1366, 768)
# Room in vLLM's core for the pixels of some small pictures, and of no screen.
CACHE_GB = 0.001


@dataclass(slots=True)
class Shown:
    """A live engine that is shown pictures, and how they are to be read; `model` is served."""

    engine: VllmEngine
    family: VisionFamily
    reader: PixelReader
    model: PreTrainedModel
    version: int = 0

    async def serve(self, model: PreTrainedModel, folder: Path, *, reload: bool = False) -> None:
        """Have the engine serve other weights: by the next version, or by the same."""
        self.version += not reload
        update = publish(model, folder / f"{self.version}-{reload}.safetensors", self.version)
        await self.engine.load_weights(replace(update, reload=reload), Path(update.location))
        self.model = model

    def expect(
        self, ids: NDArray[np.int32], shown: Sequence[ShownPicture], *, banned: bool = True
    ) -> NDArray[np.float32]:
        """Return the logprobs of tokens by the model as transformers computes them."""
        ids_left_out = self.family.banned_ids if banned else ()
        inputs = vision_inputs(ids, shown, self.family, self.reader)
        return vision_logprobs(self.model, inputs, banned=ids_left_out)

    async def sample(self, seeds: Sequence[int], tokens: int = 32, seed: int = 3) -> Completion:
        """Have the policy write after pictures drawn by `seeds`; check its logprobs."""
        ids, shown = show_pictures(self.family, [draw_picture(each) for each in seeds])
        written = await self.engine.generate(ids, Sampling(1.0, seed), tokens, pictures=shown)
        assert [span.policy for span in written.spans] == [self.engine.policy]
        self.check(ids, shown, written)
        return written

    def check(
        self, ids: NDArray[np.int32], shown: Sequence[ShownPicture], written: Completion
    ) -> None:
        """Check what the served weights wrote."""
        expected = self.expect(np.concatenate([ids, written.token_ids]), shown)[len(ids) - 1 :]
        assert np.abs(written.logprobs - expected).max() < TOLERANCE


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)],
)
async def shown(
    request: pytest.FixtureRequest, vision_folder: Callable[[str], Path]
) -> AsyncGenerator[Shown]:
    folder = vision_folder(request.param)
    vision = VisionConfig(tower="trained", projector="trained")
    policy = PolicyConfig(model=str(folder), dtype="float32", max_model_len=2048, vision=vision)
    family = load_vision_family(folder, vision)
    reader = PixelReader(folder, family)
    config = tiny_config(options={"mm_processor_cache_gb": CACHE_GB})
    engine = await VllmEngine.start_engine(config, ServedModel(folder, policy, [NEVER]))
    try:
        yield Shown(engine, family, reader, load_vision_model(folder))
    finally:
        await engine.close()


async def test_pictures_are_seen_as_the_served_weights_see_them(
    shown: Shown, tmp_path: Path
) -> None:
    first = shown.model
    await shown.serve(first, tmp_path)
    one = await shown.sample([1, 2])
    assert (await shown.sample([1, 2])).token_ids.tolist() == one.token_ids.tolist()
    # The same ids with another picture: no prefix of the other's is found.
    other = await shown.sample([3, 2])
    assert np.abs(other.logprobs[0] - one.logprobs[0]) > 10 * TOLERANCE
    # A picture that is shown twice, and none.
    await shown.sample([2, 2])
    await shown.sample([])

    await shown.serve(perturbed(first, 1), tmp_path)
    await shown.sample([1, 2])
    await shown.sample([4, 2])
    # Weights that are not trusted had the name of those after them.
    await shown.serve(first, tmp_path, reload=True)
    await shown.sample([1, 2])
    await shown.sample([5])


async def test_prompts_are_scored_with_their_pictures(shown: Shown, tmp_path: Path) -> None:
    await shown.serve(perturbed(shown.model, 7), tmp_path)
    ids, pictures = show_pictures(shown.family, [draw_picture(11), draw_picture(12, 200, 90)])
    scored = await shown.engine.compute_logprobs(ids, pictures)
    expected = shown.expect(ids, pictures, banned=False)
    assert np.abs(scored - expected).max() < TOLERANCE


async def test_ids_of_pictures_are_never_sampled_and_have_no_share(
    shown: Shown, tmp_path: Path
) -> None:
    likely = perturbed(shown.model, 8)
    with torch.no_grad():
        # Each is about as likely as the likeliest of the others.
        head = likely.get_parameter("lm_head.weight")
        strongest = head.norm(dim=-1).topk(len(shown.family.banned_ids)).indices
        head[list(shown.family.banned_ids)] = 2 * head[strongest]
    await shown.serve(likely, tmp_path)
    written = await shown.sample([1], tokens=256)
    assert not np.isin(written.token_ids, shown.family.banned_ids).any()
    ids, pictures = show_pictures(shown.family, [draw_picture(1)])
    whole = np.concatenate([ids, written.token_ids])
    with_all = shown.expect(whole, pictures, banned=False)[len(ids) - 1 :]
    assert (written.logprobs - with_all).max() > 0.1, "they were not likely"


async def test_requests_in_flight_go_on_by_the_new_weights(shown: Shown, tmp_path: Path) -> None:
    """Each token has the logprob of the weights that wrote it, on the keys and values that they and
    those before them computed."""
    old = shown.model
    ids, pictures = show_pictures(shown.family, [draw_picture(21), draw_picture(22)])
    running = [
        asyncio.create_task(shown.engine.generate(ids, Sampling(1.0, seed), 900, pictures=pictures))
        for seed in range(12)
    ]
    await asyncio.sleep(0.5)
    await shown.serve(perturbed(old, 9), tmp_path)
    await shown.sample([21, 22])
    across = [each for each in await asyncio.gather(*running) if len(each.spans) == 2]
    assert across, "no request was in flight while the weights changed"
    for written in across[:4]:
        whole = np.concatenate([ids, written.token_ids])
        switch = len(ids) + written.spans[0].length
        expected = switched_logprobs(shown, old, whole, pictures, switch)[len(ids) - 1 :]
        assert np.abs(written.logprobs - expected).max() < TOLERANCE


def switched_logprobs(
    shown: Shown,
    old: PreTrainedModel,
    ids: NDArray[np.int32],
    pictures: Sequence[ShownPicture],
    switch: int,
) -> NDArray[np.float32]:
    """Return logprobs of a sequence that `old` wrote before `switch`, and the served model after
    it."""
    inputs = vision_inputs(ids, pictures, shown.family, shown.reader)
    whole, last = inputs.pop("input_ids"), switch - 1
    inner: torch.nn.Module = getattr(old, "model")  # noqa: B009
    places, _ = inner.get_rope_index(  # pyright: ignore[reportCallIssue]
        whole, inputs["mm_token_type_ids"], image_grid_thw=inputs["image_grid_thw"]
    )
    inputs["mm_token_type_ids"] = inputs["mm_token_type_ids"][:, :last]
    with torch.no_grad():
        before = old(
            input_ids=whole[:, :last], position_ids=places[..., :last], use_cache=True, **inputs
        )
        after = shown.model(
            input_ids=whole[:, last:],
            position_ids=places[..., last:],
            past_key_values=before.past_key_values,
        )
    logits = torch.cat([before.logits, after.logits], 1)[0, :-1].float()
    logits[:, list(shown.family.banned_ids)] = -torch.inf
    return torch.log_softmax(logits, -1).gather(-1, whole[0, 1:, None])[:, 0].numpy()


async def test_a_screen_does_not_hold_the_event_loop(shown: Shown) -> None:
    ids, pictures = show_pictures(shown.family, [draw_picture(31, *SCREEN)])
    async with watched_loop() as watch:
        first = await shown.engine.generate(ids, Sampling(1.0, seed=1), 4, pictures=pictures)
        await shown.engine.generate(ids, Sampling(1.0, seed=1), 4, pictures=pictures)
    shown.check(ids, pictures, first)
    assert watch.longest_s < STALL_S


async def test_pixels_that_the_core_has_lost_are_sent_again(shown: Shown) -> None:
    await shown.sample([41, 42])
    core = shown.engine._llm.engine_core  # pyright: ignore[reportPrivateUsage]
    await core.reset_mm_cache_async()
    await shown.sample([41, 42])
    await shown.sample([41, 43])


async def test_more_pictures_than_the_core_has_room_for_are_seen(shown: Shown) -> None:
    await shown.sample(range(60, 72))
    await shown.sample(range(60, 72))
    await shown.sample([71, 60, 60, 65])


async def test_a_prompt_that_does_not_fit_its_pictures_is_refused(shown: Shown) -> None:
    ids, pictures = show_pictures(shown.family, [draw_picture(1)])
    generate = shown.engine.generate
    with pytest.raises(EngineError, match="image tokens are not those of its pictures"):
        await generate(
            np.delete(ids, pictures[0].place.offset), Sampling(1.0), 4, pictures=pictures
        )
    # Other bytes than those that the sequence was expanded for.
    other = replace(draw_picture(52), data=draw_picture(51, 300, 200).data)
    ids, pictures = show_pictures(shown.family, [other])
    with pytest.raises(EngineError, match=r"tokens in the sequence, and \d+ by the model's"):
        await generate(ids, Sampling(1.0), 4, pictures=pictures)
    await shown.sample([1])


class CountingReader(PixelReader):
    """A reader that counts what it reads."""

    count = 0

    def read(self, data: bytes) -> Pixels:
        self.count += 1
        return super().read(data)


class Core:
    """As much of vLLM as pictures need, without a cache of pixels; counts its resets."""

    def __init__(self) -> None:
        self.renderer = SimpleNamespace(mm_processor_cache=None)
        self.input_processor = SimpleNamespace()
        self.model_config = SimpleNamespace(dtype=torch.bfloat16)
        self.resets = 0

    async def reset_encoder_cache(self) -> None:
        self.resets += 1


def pictures_of(folder: Path, *, trained: bool) -> tuple[EnginePictures, Any, CountingReader]:
    family = load_vision_family(folder, VisionConfig())
    core: Any = Core()
    reader = CountingReader(folder, family)
    return EnginePictures(core, family, reader, trained=trained), core, reader


async def test_requests_that_show_one_picture_read_it_once(
    vision_folder: Callable[[str], Path],
) -> None:
    folder = vision_folder("qwen3_vl")
    engine, _, reader = pictures_of(folder, trained=False)
    family = load_vision_family(folder, VisionConfig())
    ids, pictures = show_pictures(family, [draw_picture(1), draw_picture(2), draw_picture(1)])
    requests = await asyncio.gather(*(read_pictures(engine, pictures) for _ in range(8)))
    assert reader.count == 2
    for request in requests:
        assert request is not None
        features = await request.make_features(ids)
        given = [item.get_data() for item in features["mm_kwargs"]["image"]]
        assert [tuple(each["image_grid_thw"].tolist()) for each in given] == [
            each.place.grid for each in pictures
        ]
        assert given[0]["pixel_values"].dtype == torch.bfloat16
    engine.close()


async def test_features_outlive_an_update_only_of_a_frozen_tower(
    vision_folder: Callable[[str], Path],
) -> None:
    folder = vision_folder("qwen3_vl")
    frozen, core, _ = pictures_of(folder, trained=False)
    await frozen.forget_features(reloaded=False)
    assert not core.resets and not vars(core.input_processor)
    await frozen.forget_features(reloaded=True)
    assert core.resets == 1

    trained, core, _ = pictures_of(folder, trained=True)
    names: set[str] = set()
    for trained.served in ("1.1", "1.2"):
        await trained.forget_features(reloaded=False)
        names.add(core.input_processor._get_mm_identifier("ab", None))
    assert core.resets == 2 and len(names) == 2


async def test_an_engine_of_text_is_shown_no_pictures() -> None:
    shown = [ShownPicture(draw_picture(1), PlacedPicture("", (1, 4, 4), 0))]
    assert await read_pictures(None, []) is None
    with pytest.raises(EngineError, match="no pictures: policy"):
        await read_pictures(None, shown)

"""Real vLLM on tiny random vision models: they see pictures as in transformers, by the weights that
are served.

One engine of each kind serves its tests, in their order."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from flotilla_common.images.picture import PlacedPicture, ShownPicture
from flotilla_common.images.pixels import PixelReader, Pixels
from flotilla_common.images.vision_family import load_vision_family
from flotilla_common.spec.spec import VisionConfig
from flotilla_rollout.adapters.vllm_pictures import EnginePictures, read_pictures
from flotilla_rollout.ports import EngineError
from flotilla_rollout.types import Sampling
from flotilla_rollout.work.burn_in import end_with_picture
from tests.rollout.adapters.seeing_engines import Shown, check_requests_in_flight, serving
from tests.rollout.adapters.test_vllm_transfer import offered, sending
from tests.rollout.adapters.tiny_engines import TOLERANCE
from tests.support.loop_watch import watched_loop
from tests.support.tiny_model import perturbed, publish
from tests.support.vision_models import draw_picture, show_pictures

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


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=["qwen3_vl", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)],
)
async def shown(
    request: pytest.FixtureRequest, vision_folder: Callable[[str], Path]
) -> AsyncGenerator[Shown]:
    vision = VisionConfig(tower="trained", projector="trained")
    async with serving(vision_folder(request.param), vision) as found:
        yield found


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
    await check_requests_in_flight(shown, lambda: shown.serve(perturbed(shown.model, 9), tmp_path))


async def test_a_burn_in_ends_with_the_largest_picture_that_fits(shown: Shown) -> None:
    prompt = np.resize(np.arange(3, 250, dtype=np.int32), 640)
    ids, pictures = end_with_picture(prompt, shown.family)
    assert (ids == shown.family.image_pad).sum() > 600
    for _ in range(2):
        written = await shown.engine.burn_in(ids, 16, 60.0, pictures)
        assert len(written.token_ids) == 16
        shown.check(ids, pictures, written)
    assert (await shown.engine.burn_in(ids, 512, 0.01, pictures)).timed_out
    await shown.sample([1, 2])


@pytest.mark.slow
async def test_weights_of_the_tower_are_received_from_their_sender(
    shown: Shown, tmp_path: Path
) -> None:
    await shown.serve(shown.model, tmp_path)
    async with sending(tmp_path) as (sender, address):
        for transport in ("gloo", "ipc"):

            async def receive(transport: str = transport) -> PreTrainedModel:
                shown.version += 1
                model = perturbed(shown.model, shown.version)
                update = publish(model, tmp_path / f"{shown.version}", shown.version)
                held = await offered(sender, address, update, transport)
                await shown.engine.receive_weights(held)
                return model

            await check_requests_in_flight(shown, receive)
            await shown.sample([shown.version])


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

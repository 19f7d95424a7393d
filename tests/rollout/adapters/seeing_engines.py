"""Real vLLM on tiny vision models, for the tests of this folder; what it computes is compared with
transformers' own passes."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from flotilla_common.images.picture import ShownPicture
from flotilla_common.images.pixels import PixelReader
from flotilla_common.images.vision_family import VisionFamily, load_vision_family
from flotilla_common.spec.spec import PolicyConfig, VisionConfig
from flotilla_rollout.adapters.vllm import VllmEngine
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.types import Completion, Sampling
from tests.rollout.adapters.tiny_engines import NEVER, TOLERANCE, tiny_config
from tests.support.tiny_model import publish
from tests.support.vision_models import (
    draw_picture,
    load_vision_model,
    show_pictures,
    vision_inputs,
    vision_logprobs,
)

# Room in vLLM's core for the pixels of some small pictures, and of no screen.
CACHE_GB = 0.001
# Before an update, until requests are under way: the speed of this machine is unknown.
PAUSES_S = (0.5, 2.0, 0.1, 8.0)


@dataclass(slots=True)
class Shown:
    """A live engine that is shown pictures, and how they are to be read; `model` is served."""

    engine: VllmEngine
    family: VisionFamily
    reader: PixelReader
    model: PreTrainedModel
    version: int = 0

    async def serve(
        self, model: PreTrainedModel, folder: Path, *, reload: bool = False
    ) -> PreTrainedModel:
        """Have the engine serve a model, by the next version or the same; return it."""
        self.version += not reload
        update = publish(model, folder / f"{self.version}-{reload}.safetensors", self.version)
        await self.engine.load_weights(replace(update, reload=reload), Path(update.location))
        self.model = model
        return model

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


@asynccontextmanager
async def serving(
    folder: Path, vision: VisionConfig, adapter_rank: int | None = None
) -> AsyncGenerator[Shown]:
    """Run an engine on a model's folder."""
    policy = PolicyConfig(
        model=str(folder),
        dtype="float32",
        max_model_len=2048,
        vision=vision,
        adapter_rank=adapter_rank,
    )
    family = load_vision_family(folder, vision)
    config = tiny_config(options={"mm_processor_cache_gb": CACHE_GB})
    engine = await VllmEngine.start_engine(config, ServedModel(folder, policy, [NEVER]))
    try:
        yield Shown(engine, family, PixelReader(folder, family), load_vision_model(folder))
    finally:
        await engine.close()


async def check_requests_in_flight(
    shown: Shown, update: Callable[[], Awaitable[PreTrainedModel]]
) -> None:
    """Each token of requests that run while an update to another model is made has the logprob of
    the weights that wrote it, on the keys and values that they and those before them computed."""
    ids, pictures = show_pictures(shown.family, [draw_picture(21), draw_picture(22)])
    for pause_s in PAUSES_S:
        old = shown.model
        running = [
            asyncio.create_task(
                shown.engine.generate(ids, Sampling(1.0, seed), 900, pictures=pictures)
            )
            for seed in range(12)
        ]
        await asyncio.sleep(pause_s)
        shown.model = await update()
        await shown.sample([21, 22])
        across = [each for each in await asyncio.gather(*running) if len(each.spans) == 2]
        for written in across[:4]:
            whole = np.concatenate([ids, written.token_ids])
            switch = len(ids) + written.spans[0].length
            expected = _switched_logprobs(shown, old, whole, pictures, switch)[len(ids) - 1 :]
            assert np.abs(written.logprobs - expected).max() < TOLERANCE
        if across:
            return
    raise AssertionError("no request was in flight while the weights changed")


def _switched_logprobs(
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

"""Real vLLM on tiny random vision models whose towers are frozen: what is trained around a tower is
served with it, as whole weights or as adapters.

Slow: each kind of update needs an engine of its own."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from flotilla_common.spec.spec import VisionConfig
from flotilla_rollout.ports import EngineDead
from tests.rollout.adapters.seeing_engines import Shown, check_requests_in_flight, serving
from tests.rollout.adapters.tiny_engines import TOLERANCE
from tests.support.adapted_learner import RANK, AdaptedLearner
from tests.support.picture_batches import family_of, picture_batch
from tests.support.tiny_model import perturbed, publish
from tests.support.vision_models import draw_picture, show_pictures

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(280),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]
FROZEN = VisionConfig()
KINDS = pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])


def trained_around(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    """Return a model of other text under the same tower and projector."""
    other, before = perturbed(model, seed), dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if ".visual." in name:
                parameter.copy_(before[name])
    return other


@KINDS
async def test_updates_bring_a_frozen_tower_along(
    kind: str, vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    async with serving(vision_folder(kind), FROZEN) as shown:
        first = shown.model
        await shown.serve(first, tmp_path)
        written = await shown.sample([1, 2])
        for seed in (1, 2):
            model = trained_around(shown.model, seed)
            await shown.serve(model, tmp_path)
            again = await shown.sample([1, 2])
            assert np.abs(again.logprobs[0] - written.logprobs[0]) > 10 * TOLERANCE
            await shown.sample([3 + seed])
        await check_requests_in_flight(
            shown, lambda: shown.serve(trained_around(shown.model, 3), tmp_path)
        )
        # Weights that are not trusted may have had another tower.
        await shown.serve(perturbed(first, 4), tmp_path, reload=True)
        await shown.sample([1, 2])
        await shown.serve(trained_around(first, 5), tmp_path, reload=True)
        await shown.sample([1, 2])
        await check_a_tower_that_does_not_come(shown, tmp_path / "hole.safetensors")


async def check_a_tower_that_does_not_come(shown: Shown, path: Path) -> None:
    """An engine replaces all of its weights or serves none."""
    names = dict(shown.model.named_parameters())
    left_out = next(name for name in names if "visual.blocks.0.mlp" in name)
    torn = publish(shown.model, path, shown.version + 1, without=left_out)
    with pytest.raises(EngineDead, match=r"no weights have come for visual\.blocks\.0\.mlp"):
        await shown.engine.load_weights(torn, path)
    assert shown.engine.policy is None


class SeeingLearner(AdaptedLearner):
    """Trains its adapters on pictures."""

    def train(self) -> None:
        self.version += 1
        batch = picture_batch(family_of(self.folder), step=self.version)
        self.models.trainer.train_step(batch, 1e-2)


@KINDS
async def test_adapters_are_served_next_to_a_frozen_tower(
    kind: str, vision_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = vision_folder(kind)
    learner = SeeingLearner(folder, tmp_path / "shm", vision=FROZEN, max_model_len=256)
    async with serving(folder, FROZEN, RANK) as shown:
        await load_adapters(shown, learner)
        written = await shown.sample([1, 2])
        for seed in range(2):
            await train_on(shown, learner)
            again = await shown.sample([1, 2])
            assert np.abs(again.logprobs[0] - written.logprobs[0]) > 10 * TOLERANCE
            await shown.sample([3 + seed])
            await check_prompts(shown)
        await check_requests_in_flight(shown, lambda: train_on(shown, learner))


async def train_on(shown: Shown, learner: SeeingLearner) -> PreTrainedModel:
    learner.train()
    await load_adapters(shown, learner)
    return shown.model


async def load_adapters(shown: Shown, learner: SeeingLearner) -> None:
    update = learner.publish()
    await shown.engine.load_weights(update, Path(update.location))
    shown.model = learner.merged_model()


async def check_prompts(shown: Shown) -> None:
    ids, pictures = show_pictures(shown.family, [draw_picture(11), draw_picture(12, 200, 90)])
    scored = await shown.engine.compute_logprobs(ids, pictures)
    expected = shown.expect(ids, pictures, banned=False)
    assert np.abs(scored - expected).max() < TOLERANCE

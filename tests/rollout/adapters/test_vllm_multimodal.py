"""Real vLLM on tiny published multimodal models: their text is served, without their towers, and
without torchvision where it is not installed, as on CPUs."""

import asyncio
import copy
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from flotilla_common.models.multimodal_models import TRAINED_TYPES
from flotilla_rollout.types import Publication, Sampling
from tests.rollout.adapters.tiny_engines import PROMPT, TOLERANCE, start_tiny_engine
from tests.support.multimodal_models import make_multimodal
from tests.support.tiny_model import perturbed, publish, reference_logprobs

# Of the two mechanisms by which vLLM computes text: attention, and linear attention beside it.
QUICK = ("qwen3_vl", "qwen3_5")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(280),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]


def publish_text(model: PreTrainedModel, folder: Path, version: int) -> Publication:
    """Publish the weights of the text part, by the names of the published class."""
    text: PreTrainedModel = copy.deepcopy(model)
    for name, _ in list(text.base_model.named_children()):
        if name != "language_model":
            delattr(text.base_model, name)
    return publish(text, folder / "text.safetensors", version)


async def check_text(folder: Path, kind: str) -> None:
    """Check the logprobs of the text that an engine writes before and after an update."""
    model = make_multimodal(folder, kind)
    # Published folders name processors of images that cannot be loaded here.
    (folder / "preprocessor_config.json").write_text(
        '{"image_processor_type": "Qwen2VLImageProcessorFast"}'
    )
    engine = await start_tiny_engine(folder)
    try:
        for version, weights in enumerate((model, perturbed(model, seed=1))):
            update = publish_text(weights, folder, version)
            await engine.load_weights(update, Path(update.location))
            # Of different lengths, so that some are prompts while others go on.
            prompts = [np.concatenate([PROMPT, PROMPT[:more]]) for more in (0, 7, 20, 40)]
            written = await asyncio.gather(
                *(engine.generate(each, Sampling(1.0, seed=3), 48) for each in prompts)
            )
            for prompt, completion in zip(prompts, written, strict=True):
                whole = np.concatenate([prompt, completion.token_ids])
                expected = reference_logprobs(weights, whole)[len(prompt) - 1 :]
                assert np.abs(completion.logprobs - expected).max() < TOLERANCE
    finally:
        await engine.close()


@pytest.mark.parametrize("kind", [QUICK[0], pytest.param(QUICK[1], marks=pytest.mark.slow)])
async def test_the_text_of_a_published_model_is_served_without_its_tower(
    kind: str, tmp_path: Path
) -> None:
    await check_text(tmp_path, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(TRAINED_TYPES) - set(QUICK)))
async def test_the_text_of_its_kin_is_served_the_same(kind: str, tmp_path: Path) -> None:
    await check_text(tmp_path, kind)

"""Real vLLM names the experts that it chose: those that transformers chooses with the same
weights."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from flotilla_common.spec.spec import PolicyConfig
from flotilla_rollout.adapters.vllm_options import ServedModel
from flotilla_rollout.adapters.vllm_start import start_engines
from flotilla_rollout.config.rollout import EngineConfig
from flotilla_rollout.episodes.transcript import Transcript
from flotilla_rollout.ports import Engine
from flotilla_rollout.types import Publication, Sampling
from tests.rollout.adapters.tiny_engines import NEVER
from tests.support.tiny_model import make_sparse_model, perturbed, publish

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(560),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

PROMPT = np.arange(3, 70, dtype=np.int32)
OBSERVED = np.arange(100, 140, dtype=np.int32)
LAYERS, CHOSEN = 2, 2


# A whole attempt, in blocks of 32.
LONGEST = 288
# Tried until requests have begun and are cut: the speed of this machine is unknown.
TIMES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)


async def started(folder: Path, **options: Any) -> Engine:
    policy = PolicyConfig(
        model=str(folder), dtype="float32", max_model_len=LONGEST, routing_replay="measure"
    )
    config = EngineConfig.model_validate({"device": "cpu", "max_num_seqs": 8, **options})
    return await start_engines(config, ServedModel(folder, policy, [NEVER]))


def own_experts(model: PreTrainedModel, token_ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return the experts that transformers chooses in the second layer, in order of their ids."""
    seen: list[torch.Tensor] = []
    router: Any = model.model.layers[1].mlp.gate
    hook = router.register_forward_hook(lambda _m, _i, found: seen.append(found[2]))
    with torch.no_grad():
        model(torch.tensor(token_ids.tolist())[None])
    hook.remove()
    return seen[0].sort(-1).values.numpy()


async def play(engine: Engine, seed: int, turns: int = 3, most: int = 40) -> Transcript:
    """Play turns with an observation between them, as attempts do."""
    transcript = Transcript(PROMPT)
    for turn in range(turns):
        sampling = Sampling(1.0, seed, experts_from=transcript.known_experts)
        written = await engine.generate(transcript.for_engine(), sampling, most)
        transcript.add_completion(written, 1.0)
        if turn + 1 < turns:
            transcript.add_observation(OBSERVED.tolist())
    return transcript


def check_transcript(transcript: Transcript, model: PreTrainedModel) -> None:
    experts = transcript.sequence.experts
    assert experts is not None
    assert experts.shape == (len(transcript) - 1, LAYERS, CHOSEN)
    assert experts.dtype == np.uint8
    assert not experts[:, 0].any(), "the first layer has no experts"
    own = own_experts(model, transcript.token_ids)[:-1]
    np.testing.assert_array_equal(np.sort(experts[:, 1]), own)


async def check_engine(engine: Engine, folder: Path, model: PreTrainedModel) -> None:
    for version in range(2):
        each = perturbed(model, version)
        update = publish(each, folder / f"{version}.safetensors", version)
        await engine.load_weights(update, Path(update.location))
        played = await asyncio.gather(*(play(engine, seed) for seed in range(12)))
        for transcript in played:
            check_transcript(transcript, each)
        alone = await play(engine, 0)
        check_transcript(alone, each)


async def write_for(
    engine: Engine, seconds: float, update: Publication | None = None
) -> list[Transcript]:
    """Return what several requests write in so long, of those that time cuts or that the update,
    halfway, finds running."""
    requests = [
        asyncio.create_task(engine.generate(PROMPT, Sampling(1.0, seed), 200, seconds))
        for seed in range(24)
    ]
    if update is not None:
        await asyncio.sleep(seconds / 2)
        await engine.load_weights(update, Path(update.location))
    found: list[Transcript] = []
    for written in await asyncio.gather(*requests):
        if len(written.token_ids) and (written.timed_out or len(written.spans) > 1):
            found.append(Transcript(PROMPT))
            found[-1].add_completion(written, 1.0)
    return found


async def check_what_time_cuts(engine: Engine, model: PreTrainedModel) -> None:
    for seconds in TIMES_S:
        found = await write_for(engine, seconds)
        for transcript in found:
            check_transcript(transcript, model)
        if found:
            return
    raise AssertionError("no turn was cut")


async def check_across_an_update(engine: Engine, folder: Path, model: PreTrainedModel) -> None:
    """Check that what the older weights computed keeps the experts that they chose."""
    for version, seconds in enumerate(TIMES_S, 2):
        old, new = perturbed(model, (version - 1) % 2), perturbed(model, version % 2)
        update = publish(new, folder / "new.safetensors", version)
        found = [one for one in await write_for(engine, seconds, update) if len(one.spans) == 3]
        for transcript in found:
            check_switch(transcript, old)
        if found:
            return
    raise AssertionError("no update found a turn under way")


def check_switch(transcript: Transcript, old: PreTrainedModel) -> None:
    experts = transcript.sequence.experts
    assert experts is not None
    chosen, own = np.sort(experts[:, 1]), own_experts(old, transcript.token_ids)[:-1]
    switch = len(PROMPT) + transcript.spans[1].length - 1
    np.testing.assert_array_equal(chosen[:switch], own[:switch])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tensor_parallel": 2},
        {"data_parallel": 2},
        # Room for slightly more than one such attempt: others are preempted.
        {"kv_cache_memory_bytes": 12 * 32 * 2 * 2 * 2 * 32 * 4},
    ],
    ids=["one", "two workers", "two engines", "little memory"],
)
async def test_an_engine_names_the_experts_that_it_chose(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = make_sparse_model(tmp_path)
    engine = await started(tmp_path, **options)
    try:
        await check_engine(engine, tmp_path, model)
        if not options:
            await check_what_time_cuts(engine, perturbed(model, 1))
            await check_across_an_update(engine, tmp_path, model)
    finally:
        await engine.close()

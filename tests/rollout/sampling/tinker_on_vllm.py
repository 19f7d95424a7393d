"""The rollout's Tinker engine, through Tinker's client and the front door, on a real vLLM."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tinker

from flotilla_common.domain.policy import PolicyId
from flotilla_common.spec.spec import TinkerConfig
from flotilla_common.weights.sampler_reference import write_reference
from flotilla_rollout.adapters.tinker_engine import TinkerEngine
from flotilla_rollout.types import Publication, Sampling
from flotilla_rollout.work.service_use import ServiceUse
from flotilla_tinker.adapters.sampling_peer import GrpcSamplingPeer
from tests.rollout.sampling.served_samplers import (
    PROMPT,
    TOLERANCE,
    ServedSamplers,
    all_logprobs,
    make_adapter,
)
from tests.support.tinker_front import KEY, serving_front
from tests.tinker.work.desk_doubles import BASE, ScriptedTrainer

# So many tokens that a random model soon writes one of them.
_ENDS = tuple(range(100, 130))
_POLICY = PolicyId(1, 0)


@dataclass(slots=True)
class AdapterTrainer(ScriptedTrainer):
    """A trainer whose every model is one adapter of `base`."""

    base: Path = Path()

    async def export_weights(self, model_id: str, number: int, folder: str) -> int:
        make_adapter(self.base, Path(folder), seed=9)
        return 1


async def check_tinker_engine(served: ServedSamplers, base: Path, folder: Path) -> None:
    """Check that sampled turns keep their ends, and that all logprobs are those of the weights."""
    model = make_adapter(base, folder / "reference", seed=9)
    async with _engine_on(served, base, folder) as engine:
        turns = [
            await engine.generate(PROMPT, Sampling(temperature=1.0, seed=seed), 64)
            for seed in range(6)
        ]
        assert any(not turn.cut for turn in turns)
        for turn in turns:
            ids = turn.token_ids
            ends = np.isin(ids, _ENDS)
            assert not ends[:-1].any()
            assert bool(ends[-1]) is not turn.cut
            assert (len(ids) == 64) is turn.cut
            whole = np.concatenate([PROMPT, ids])
            scored = await engine.compute_logprobs(whole)
            assert len(scored) == len(whole) - 1
            assert np.abs(scored[len(PROMPT) - 1 :] - turn.logprobs).max() < TOLERANCE
            table = all_logprobs(model, whole)[:-1]
            own = table[np.arange(len(table)), whole[1:]]
            assert np.abs(own - scored).max() < TOLERANCE
        again = await engine.generate(PROMPT, Sampling(temperature=1.0, seed=0), 64)
        assert again.token_ids.tolist() == turns[0].token_ids.tolist()


@asynccontextmanager
async def _engine_on(
    served: ServedSamplers, base: Path, folder: Path
) -> AsyncGenerator[TinkerEngine]:
    """An engine that serves an adapter of the base."""
    trainer, sampler = AdapterTrainer(base=base), GrpcSamplingPeer(served.channel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", KEY)
        async with serving_front(folder / "front", trainer, sampler) as url:
            config = TinkerConfig(url=url)
            engine = await TinkerEngine.start_engine(config, "run-1", _ENDS, ServiceUse())
            path = folder / "reference.weights"
            manifest = write_reference(path, await asyncio.to_thread(_save_weights, url))
            size = path.stat().st_size
            await engine.load_weights(
                Publication(_POLICY, manifest, size, "shared_memory", str(path), PROMPT, 20.0), path
            )
            yield engine
            await engine.close()


def _save_weights(url: str) -> str:
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    trainer = client.create_lora_training_client(BASE, rank=8).result()
    address = trainer.save_weights_for_sampler("weights").result().path
    client.close("success").result()
    return address

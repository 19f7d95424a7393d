"""A real engine whose workers are on two machines: what one machine samples, never a mixed policy,
and nothing that is left of it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flotilla_rollout.ports import Engine, TransportFailed
from flotilla_rollout.types import Completion, Publication, Sampling
from tests.rollout.adapters.test_vllm_transfer import Served, check_received, with_wrong_checksum
from tests.rollout.adapters.tiny_engines import PROMPT, start_tiny_engine
from tests.rollout.nodes.machines import config_of, head, left_of
from tests.support.tiny_model import make_sparse_model, publish

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(560),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]


async def sample(engine: Engine, update: Publication) -> list[Completion]:
    """Load weights and sample by them."""
    await engine.load_weights(update, Path(update.location))
    turns = [engine.generate(PROMPT, Sampling(1.0, seed), 48) for seed in range(4)]
    return await asyncio.gather(*turns)


async def check_staged(served: Served, updates: int) -> None:
    for _ in range(updates):
        update = served.next_update()
        await served.engine.load_weights(update, Path(update.location))
        await served.check_serves(update)


async def check_damage_is_not_served(served: Served) -> None:
    """Weights that do not reach a machine whole change nothing."""
    policy = served.engine.policy
    update = publish(served.model, served.scratch / "damaged", 99)
    damaged = replace(update, manifest=with_wrong_checksum(update))
    with pytest.raises(TransportFailed, match="differs from its checksum"):
        await served.engine.load_weights(damaged, Path(update.location))
    assert served.engine.policy == policy


async def test_two_machines_sample_what_one_does_and_follow_the_weights_until_dismissed(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    model = make_sparse_model(folder)
    update = publish(model, tmp_path / "first", 0)
    alone = await start_tiny_engine(folder, tensor_parallel=2)
    expected = await sample(alone, update)
    await alone.close()
    async with head(tmp_path, folder, config_of()) as rollout:
        machine = await rollout.machine()
        engine = await rollout.start()
        assert len(machine.workers()) == 1
        for here, there in zip(await sample(engine, update), expected, strict=True):
            assert here.token_ids.tolist() == there.token_ids.tolist()
            np.testing.assert_allclose(here.logprobs, there.logprobs, rtol=0, atol=1e-5)
        served = Served(engine, model, tmp_path)
        await check_staged(served, updates=3)
        await check_received(served, tmp_path, updates=3)
        await check_damage_is_not_served(served)
        await check_staged(served, updates=1)
        machine.process.terminate()
        await asyncio.wait_for(rollout.drain.wait(), 10)
        # Until the rollout has drained, its workers are needed.
        assert machine.process.returncode is None
        await sample(engine, served.next_update())
        await rollout.close()
        assert await machine.ended() == 0
    assert left_of(tmp_path) == []

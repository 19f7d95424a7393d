"""A Tinker engine on the real front door behind a faulty proxy, with scripted peers."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import tinker

from flotilla_common.domain.policy import PolicyId
from flotilla_common.spec.spec import TinkerConfig
from flotilla_common.weights.sampler_reference import write_reference
from flotilla_rollout.adapters.tinker_engine import TinkerEngine
from flotilla_rollout.types import Publication
from flotilla_rollout.work.service_use import ServiceUse
from flotilla_tinker.types import SampleOrder, SampleResult
from tests.support.faulty_tinker import FaultyTinker, faulty_tinker
from tests.support.tinker_front import KEY, serving_front
from tests.support.tinker_sessions import end_sessions
from tests.tinker.work.desk_doubles import BASE, ScriptedEngine, ScriptedTrainer

# The client leaves connections to garbage collection.
COLLECTED = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
STOP_ID = 999
CANARY = np.array([5, 6, 7], np.int32)
PROMPT = np.array([11, 12, 13, 14], np.int32)


@dataclass(slots=True)
class ScriptedTurns(ScriptedEngine):
    """Turns of three tokens, the last of which ends them; the first two depend on the weights."""

    orders: list[SampleOrder] = field(default_factory=list[SampleOrder])
    # As a service that leaves out the end of a turn.
    drops_end: bool = False

    async def sample(self, sampler_id: str, order: SampleOrder) -> SampleResult:
        self.orders.append(order)
        # Not `super()`, which slots break.
        [answer] = (await ScriptedEngine.sample(self, sampler_id, order)).answers
        end = order.stop_ids[0] if order.stop_ids else STOP_ID
        ids = np.append(answer.token_ids[:2], np.int32(end))[: order.max_tokens]
        ids = ids[:2] if self.drops_end else ids
        answer = replace(
            answer,
            token_ids=ids,
            logprobs=-ids.astype(np.float32) / 1000,
            stopped=order.max_tokens >= 3,
            spans=[(answer.spans[0][0], len(ids))],
        )
        scores = (-order.prompt_ids / 100).astype(np.float32)
        scores[0] = np.nan
        return SampleResult([answer], scores if order.prompt_logprobs else None)


@dataclass
class TinkerStage:
    """The engine, everything behind it, and addresses of two saved weights."""

    engine: TinkerEngine
    use: ServiceUse
    sampler: ScriptedTurns
    proxy: FaultyTinker
    addresses: Sequence[str]
    folder: Path

    async def load(self, version: int, address: str = "") -> PolicyId:
        """Serve weights of an address, which the version chooses if none is given."""
        policy = PolicyId(1, version)
        path = self.folder / "reference"
        manifest = write_reference(path, address or self.addresses[version])
        size = path.stat().st_size
        await self.engine.load_weights(
            Publication(policy, manifest, size, "shared_memory", str(path), CANARY, 20.0), path
        )
        return policy

    async def reset(self) -> None:
        """Serve the first weights, without faults, as if nothing had happened."""
        self.proxy.heal()
        self.sampler.gate, self.sampler.drops_end = None, False
        await self.load(0)
        self.proxy.calls.clear()
        self.sampler.orders.clear()
        self.use.prompt_tokens = self.use.sampled_tokens = 0


@asynccontextmanager
async def staged_engine(folder: Path) -> AsyncGenerator[TinkerStage]:
    """An engine that serves the first of two weights."""
    sampler, use = ScriptedTurns(), ServiceUse()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINKER_API_KEY", KEY)
        patch.setenv("TINKER_TELEMETRY", "0")
        async with (
            serving_front(folder, ScriptedTrainer(), sampler) as url,
            faulty_tinker(url) as proxy,
        ):
            addresses = await asyncio.to_thread(save_weights, url)
            config = TinkerConfig(url=proxy.url)
            engine = await TinkerEngine.start_engine(config, "run-1", [STOP_ID], use)
            try:
                yield TinkerStage(engine, use, sampler, proxy, addresses, folder)
            finally:
                proxy.heal()
                await engine.close()
                end_sessions()


def save_weights(url: str) -> Sequence[str]:
    """Train a model for a step, and return the addresses of its weights before and after."""
    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    trainer = client.create_lora_training_client(BASE, rank=8).result()
    before = trainer.save_weights_for_sampler("before").result().path
    trainer.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    after = trainer.save_weights_for_sampler("after").result().path
    client.holder.close()
    return before, after

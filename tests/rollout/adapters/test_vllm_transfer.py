"""Real vLLM that receives its weights from a real sender process: what it serves afterwards is what
was sent, or nothing. The quick test of it shares its engine with those of test_vllm_engine.py."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from transformers import (
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from flotilla_common.process.python_command import python_command
from flotilla_common.weights.fingerprint import TensorEntry
from flotilla_common.weights.weight_transfer import TransferSettings
from flotilla_learner.types import Publication as Written
from flotilla_learner.weights import publication_child
from flotilla_learner.weights.publication_child import PublicationChild
from flotilla_learner.weights.sender_config import WeightSenderConfig
from flotilla_rollout.ports import Engine, TransportFailed, WeightsTorn
from flotilla_rollout.types import Completion, Publication
from tests.rollout.adapters.tiny_engines import PROMPT, TOLERANCE, start_tiny_engine
from tests.support.process_forge import ProcessForge
from tests.support.tiny_model import load_model, make_kind, perturbed, publish, reference_logprobs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(280),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

SENDER = "flotilla_learner.weights.adapters.weight_sender"
FAILING = "tests.support.failing_sender"
PIECE_BYTES = 1 << 16


@asynccontextmanager
async def sending(
    folder: Path,
    module: str = SENDER,
    run: str = "r",
    stall_s: float = 60.0,
    *,
    forge: ProcessForge | None = None,
) -> AsyncGenerator[tuple[PublicationChild, str]]:
    """Run a sender: a fork of the forge, if there is one."""
    sender = PublicationChild(module, folder / "sender.log")
    command = python_command if forge is None else forge.python_command
    try:
        settings = TransferSettings(stall_s, PIECE_BYTES)
        config = WeightSenderConfig(run, shares_devices=True, settings=settings)
        with patch.object(publication_child, "python_command", command):
            address = await sender.start_process(config)
        yield sender, address
    finally:
        await sender.close()


async def offered(
    sender: PublicationChild, address: str, update: Publication, transport: str = "gloo"
) -> Publication:
    """Have the sender hold a publication that lies in a file; return it as announced."""
    path = Path(update.location)
    fields = (update.policy.version, update.policy.fingerprint, update.manifest)
    nothing = np.zeros(0, np.float32)
    published = Written(*fields, update.total_bytes, path, update.canary_token_ids, nothing)
    await sender.serve_publication(published, update.policy)
    return replace(update, transport=transport, location=address)


class Served:
    """A live engine, and the models whose weights it is given."""

    def __init__(
        self, engine: Engine, model: PreTrainedModel, scratch: Path, version: int = 0
    ) -> None:
        """Take the engine's model, and the version after which its updates are numbered."""
        self.engine = engine
        self.model = model
        self.scratch = scratch
        self._version = version

    def next_update(self) -> Publication:
        """Return the publication of a model with other weights."""
        self._version += 1
        self.model = perturbed(self.model, self._version)
        return publish(self.model, self.scratch / f"v{self._version}", self._version)

    async def check_serves(self, update: Publication) -> None:
        assert self.engine.policy == update.policy
        canary = await self.engine.compute_logprobs(update.canary_token_ids)
        expected = reference_logprobs(self.model, update.canary_token_ids)
        assert float(np.abs(canary - expected).max()) < TOLERANCE

    async def begin_turn_within(self, change: Awaitable[None]) -> asyncio.Task[Completion]:
        """Have a change of weights leave them torn while a turn is under way; return the turn."""
        changing = asyncio.ensure_future(change)
        turn = self.begin_turn()
        while not changing.done():
            await asyncio.wait({turn, changing}, return_when=asyncio.FIRST_COMPLETED)
            # Opening a group takes longer than a turn.
            if turn.done() and not changing.done():
                turn = self.begin_turn()
        with pytest.raises(WeightsTorn):
            await changing
        return turn

    def begin_turn(self) -> asyncio.Task[Completion]:
        """Begin a turn that is long whatever is sampled."""
        return asyncio.create_task(self.engine.burn_in(PROMPT, 600, 60.0))


@asynccontextmanager
async def serving(
    folder: Path, model: PreTrainedModel, scratch: Path, workers: int = 1
) -> AsyncGenerator[Served]:
    engine = await start_tiny_engine(folder, tensor_parallel=workers)
    try:
        yield Served(engine, model, scratch)
    finally:
        await engine.close()


async def check_torn_transfer(
    served: Served,
    folder: Path,
    failing: str,
    transport: str = "gloo",
    *,
    forge: ProcessForge | None = None,
) -> None:
    """An engine whose sender fails in the middle computes nothing until it has been loaded whole;
    a turn that was under way then continues."""
    engine, before = served.engine, served.engine.policy
    # It is waited for after the failure.
    failing_sender = sending(folder, FAILING, failing, stall_s=3.0, forge=forge)
    async with failing_sender as (sender, address):
        update = await offered(sender, address, served.next_update(), transport)
        turn = await served.begin_turn_within(engine.receive_weights(update))
    assert engine.policy is None
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(engine.compute_logprobs(PROMPT), 0.5)
    assert not turn.done()
    whole = served.next_update()
    await engine.load_weights(whole, Path(whole.location))
    await served.check_serves(whole)
    assert [span.policy for span in (await turn).spans] == [before, whole.policy]


async def check_served_on(served: Served, serves: Publication, sent: Publication) -> None:
    """An engine that cannot be sent weights serves with its old ones."""
    turn = served.begin_turn()
    with pytest.raises(TransportFailed):
        await served.engine.receive_weights(sent)
    await served.check_serves(serves)
    assert [span.policy for span in (await turn).spans] == [serves.policy]


async def check_received(
    served: Served,
    folder: Path,
    updates: int,
    transports: Sequence[str] = ("gloo",),
    *,
    forge: ProcessForge | None = None,
) -> None:
    async with sending(folder, forge=forge) as (sender, address):
        assert sender.devices >= set(await served.engine.identify_devices())
        for number in range(updates):
            sent = (sender, address, update := served.next_update())
            transport = transports[number % len(transports)]
            await served.engine.receive_weights(await offered(*sent, transport))
            await served.check_serves(update)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
async def test_what_fails_otherwise_leaves_the_engine_serving_or_torn(
    engine_folder: Path, tmp_path: Path, workers: int
) -> None:
    async with serving(engine_folder, load_model(engine_folder), tmp_path, workers) as served:
        await check_received(served, tmp_path, 2, ("gloo", "ipc"))
        await check_torn_transfer(served, tmp_path, "kill-3")
        await check_torn_transfer(served, tmp_path, "stop-4")
        await check_torn_transfer(served, tmp_path, "kill-3", "ipc")
        await check_torn_transfer(served, tmp_path, "stop-4", "ipc")
        await check_received(served, tmp_path, updates=1)
        held = served.next_update()
        await served.engine.load_weights(held, Path(held.location))
        async with sending(tmp_path) as (sender, address):
            damaged = replace(held, manifest=with_wrong_checksum(held))
            with pytest.raises(WeightsTorn, match="differs from its checksum"):
                await served.engine.receive_weights(await offered(sender, address, damaged))
            await served.engine.load_weights(held, Path(held.location))
            unknown = replace(held, policy=replace(held.policy, version=99))
            sent = replace(unknown, location=address, transport="gloo")
            await check_served_on(served, held, sent)
        # Its sender is gone.
        await check_served_on(served, held, replace(held, location=address, transport="gloo"))


def with_wrong_checksum(update: Publication) -> tuple[TensorEntry, ...]:
    first, *others = update.manifest
    return (replace(first, checksum=first.checksum ^ 1), *others)


KINDS = {
    "Llama": LlamaConfig,
    "Qwen2": Qwen2Config,
    "Qwen3": Qwen3Config,
    "Qwen3-MoE": Qwen3MoeConfig,
}


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
async def test_ten_updates_reach_every_worker_of_each_kind_of_model(
    kind: type[PreTrainedConfig], tied: bool, workers: int, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    model = make_kind(folder, kind, tied=tied)
    async with serving(folder, model, tmp_path, workers) as served:
        await check_received(served, tmp_path, 10, ("gloo", "gloo", "ipc"))

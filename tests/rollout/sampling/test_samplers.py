"""Samplers by an engine that answers at once: who has which weights, and for how long."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from flotilla_common.rpc.errors import ServiceError
from flotilla_rollout.ports import RequestAborted
from flotilla_rollout.sampling.order_checks import EngineLimits
from flotilla_rollout.sampling.ports import Adopt, UnfitWeights
from flotilla_rollout.sampling.samplers import SamplerRoom, Samplers
from flotilla_rollout.sampling.types import (
    EngineAnswer,
    NamedWeights,
    PromptReport,
    RequestWeights,
    SamplingOrder,
)

WEIGHT = "model.layers.0.q_proj.weight"
ORDER = SamplingOrder(
    prompt_ids=np.arange(4, dtype=np.int32),
    num_samples=1,
    max_tokens=4,
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    seed=1,
    stop_strings=(),
    stop_ids=(),
    prompt_logprobs=False,
    topk=0,
)


class InstantEngine:
    """An engine whose answers name the state of weights that it is in. It answers while `answers`
    is set, and reads adapters while `reads` is."""

    def __init__(self) -> None:
        self.state = 0
        self.loaded: list[Path] = []
        self.adapters: dict[int, Path] = {}
        self.used: list[RequestWeights] = []
        self.answers, self.reads = asyncio.Event(), asyncio.Event()
        self.answers.set()
        self.reads.set()

    async def add_adapter(self, number: int, folder: Path) -> None:
        assert number not in self.adapters
        self.adapters[number] = folder

    async def replace_adapter(self, number: int, folder: Path, adopt: Adopt) -> None:
        if folder.name == "unreadable":
            raise UnfitWeights("vLLM cannot read it")
        await self.reads.wait()
        self.adapters[number] = folder
        self.state += 1
        adopt()

    async def remove_adapter(self, number: int) -> None:
        del self.adapters[number]

    async def load_model(self, folder: Path, adopt: Adopt) -> None:
        self.loaded.append(folder)
        self.state += 1
        adopt()

    @asynccontextmanager
    async def take_slot(self) -> AsyncGenerator[None]:
        yield

    async def sample_answer(
        self, order: SamplingOrder, index: int, weights: RequestWeights
    ) -> EngineAnswer:
        self.used.append(weights)
        first = self.state
        await self.answers.wait()
        spans = ((first, 2), (self.state, 2)) if first != self.state else ((first, 4),)
        return EngineAnswer(np.zeros(4, np.int32), np.zeros(4, np.float32), True, spans, 3)

    async def score_prompt(
        self, order: SamplingOrder, weights: RequestWeights
    ) -> tuple[PromptReport, int]:
        empty = np.zeros((4, 0), np.float32)
        return PromptReport(np.zeros(4, np.float32), empty.astype(np.int32), empty), self.state


def write_model(folder: Path) -> None:
    folder.mkdir()
    save_file({WEIGHT: np.zeros((6, 5), np.float32)}, folder / "model.safetensors")


def write_adapter(folder: Path) -> None:
    folder.mkdir()
    prefix = f"base_model.model.{WEIGHT.removesuffix('.weight')}"
    matrices = {"A": np.zeros((2, 5), np.float32), "B": np.zeros((6, 2), np.float32)}
    named = {f"{prefix}.lora_{each}.weight": value for each, value in matrices.items()}
    save_file(named, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text('{"r": 2}')


@pytest.fixture
def engine() -> InstantEngine:
    return InstantEngine()


@pytest.fixture
def samplers(engine: InstantEngine, tmp_path: Path) -> Samplers:
    for name in ("a", "b", "unreadable"):
        write_adapter(tmp_path / name)
    for name in ("one", "two"):
        write_model(tmp_path / name)
    room = SamplerRoom(3, 4, 2, tmp_path / "base", {WEIGHT: (6, 5)})
    return Samplers(engine, room, EngineLimits(32, 100, 20))


def adapter(folder: Path, name: str) -> NamedWeights:
    return NamedWeights(name, "adapter", folder / name)


def model(folder: Path, name: str) -> NamedWeights:
    return NamedWeights(name, "model", folder / name)


async def test_spans_name_the_samplers_own_weights_whatever_others_do(
    samplers: Samplers, engine: InstantEngine, tmp_path: Path
) -> None:
    await samplers.open_sampler("live", adapter(tmp_path, "a"))
    await samplers.open_sampler("kept", adapter(tmp_path, "a"))
    engine.answers.clear()
    live = asyncio.create_task(samplers.sample("live", ORDER))
    kept = asyncio.create_task(samplers.sample("kept", ORDER))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await samplers.replace_weights("live", adapter(tmp_path, "b"))
    engine.answers.set()
    assert (await live).answers[0].spans == (("a", 2), ("b", 2))
    assert (await kept).answers[0].spans == (("a", 4),)
    assert (await samplers.sample("live", ORDER)).answers[0].spans == (("b", 4),)
    salts = {weights.salt for weights in engine.used}
    assert len(salts) == 3, "two weights share a prefix cache"


async def test_what_is_asked_while_weights_are_being_read_leaves_nothing_in_their_cache(
    samplers: Samplers, engine: InstantEngine, tmp_path: Path
) -> None:
    await samplers.open_sampler("live", adapter(tmp_path, "a"))
    engine.reads.clear()
    replacing = asyncio.create_task(samplers.replace_weights("live", adapter(tmp_path, "b")))
    await asyncio.sleep(0.05)
    assert (await samplers.sample("live", ORDER)).answers[0].spans == (("a", 4),)
    engine.reads.set()
    await replacing
    await samplers.sample("live", ORDER)
    old, new = engine.used
    assert old.salt != new.salt


async def test_a_request_that_newer_weights_have_begun_is_begun_again(
    samplers: Samplers, engine: InstantEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its prefix may come from the older ones."""
    await samplers.open_sampler("live", adapter(tmp_path, "a"))
    sample, slips, names = engine.sample_answer, [1], cycle("ba")

    async def sample_late(
        order: SamplingOrder, index: int, weights: RequestWeights
    ) -> EngineAnswer:
        if slips[0]:
            slips[0] -= 1
            await samplers.replace_weights("live", adapter(tmp_path, next(names)))
        return await sample(order, index, weights)

    monkeypatch.setattr(engine, "sample_answer", sample_late)
    assert (await samplers.sample("live", ORDER)).answers[0].spans == (("b", 4),)
    assert len(engine.used) == 2
    slips[0] = 9
    with pytest.raises(RequestAborted, match="the weights changed 4 times"):
        await samplers.sample("live", ORDER)


async def test_a_closed_samplers_adapter_stays_until_its_last_answer(
    samplers: Samplers, engine: InstantEngine, tmp_path: Path
) -> None:
    await samplers.open_sampler("a", adapter(tmp_path, "a"))
    await samplers.open_sampler("b", adapter(tmp_path, "b"))
    engine.answers.clear()
    running = asyncio.create_task(samplers.sample("a", ORDER))
    await asyncio.sleep(0)
    await samplers.close_sampler("a")
    await samplers.close_sampler("a")
    assert samplers.ids == ("b",)
    assert len(engine.adapters) == 2
    await samplers.open_sampler("a", adapter(tmp_path, "b"))
    with pytest.raises(ServiceError, match="TOO_MANY_SAMPLERS"):
        await samplers.open_sampler("c", adapter(tmp_path, "b"))
    engine.answers.set()
    await running
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert sorted(engine.adapters) == [2, 3]
    await samplers.open_sampler("c", NamedWeights("base", "base"))


async def test_whole_models_are_loaded_when_asked_and_replaced_in_place_only_if_loaded(
    samplers: Samplers, engine: InstantEngine, tmp_path: Path
) -> None:
    await samplers.open_sampler("base", NamedWeights("base", "base"))
    await samplers.open_sampler("one", model(tmp_path, "one"))
    assert engine.loaded == []
    assert (await samplers.sample("one", ORDER)).answers[0].spans == (("one", 4),)
    await samplers.sample("one", ORDER)
    assert engine.loaded == [tmp_path / "one"]
    await samplers.replace_weights("one", model(tmp_path, "two"))
    assert engine.loaded == [tmp_path / "one", tmp_path / "two"]
    assert (await samplers.sample("base", ORDER)).answers[0].spans == (("base", 4),)
    assert engine.loaded[2:] == [tmp_path / "base"]
    await samplers.replace_weights("one", model(tmp_path, "one"))
    assert len(engine.loaded) == 3
    assert (await samplers.sample("one", ORDER)).answers[0].spans == (("one", 4),)
    assert engine.loaded[3:] == [tmp_path / "one"]


async def test_a_model_that_has_gone_since_is_refused_and_the_engine_answers_on(
    samplers: Samplers, engine: InstantEngine, tmp_path: Path
) -> None:
    await samplers.open_sampler("base", NamedWeights("base", "base"))
    await samplers.open_sampler("one", model(tmp_path, "one"))
    (tmp_path / "one" / "model.safetensors").unlink()
    with pytest.raises(ServiceError, match="NO_WEIGHTS"):
        await samplers.sample("one", ORDER)
    await samplers.sample("base", ORDER)
    assert engine.loaded == []


async def test_refused_weights_leave_the_sampler_as_it_was(
    samplers: Samplers, tmp_path: Path
) -> None:
    await samplers.open_sampler("a", adapter(tmp_path, "a"))
    await samplers.open_sampler("a", adapter(tmp_path, "a"))
    for weights, reason in (
        (adapter(tmp_path, "unreadable"), "NO_WEIGHTS"),
        (adapter(tmp_path, "one"), "NO_WEIGHTS"),
        (model(tmp_path, "one"), "BAD_REQUEST"),
        (NamedWeights("base", "base"), "BAD_REQUEST"),
    ):
        with pytest.raises(ServiceError, match=reason):
            await samplers.replace_weights("a", weights)
    with pytest.raises(ServiceError, match="SAMPLER_EXISTS"):
        await samplers.open_sampler("a", adapter(tmp_path, "b"))
    with pytest.raises(ServiceError, match="SAMPLER_UNKNOWN"):
        await samplers.replace_weights("b", adapter(tmp_path, "b"))
    assert (await samplers.sample("a", ORDER)).answers[0].spans == (("a", 4),)

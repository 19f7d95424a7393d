"""Real vLLM on two workers, and on two engines: each of them follows the weights, and none outlives
the rollout."""

import asyncio
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import psutil
import pytest
from transformers import PreTrainedModel

from flotilla_rollout.ports import Engine
from flotilla_rollout.types import Publication, Sampling
from tests.rollout.adapters.tiny_engines import PROMPT, TOLERANCE, start_tiny_engine
from tests.support.process_commands import command_of
from tests.support.tiny_model import make_sparse_model, perturbed, publish, reference_logprobs

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(560),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

END_S = 30.0


async def largest_error(
    engine: Engine, model: PreTrainedModel, update: Publication
) -> tuple[float, float]:
    """Load weights; return how far the canary, and what is sampled then, are from the model."""
    await engine.load_weights(update, Path(update.location))
    canary = await engine.compute_logprobs(update.canary_token_ids)
    off = np.abs(canary - reference_logprobs(model, update.canary_token_ids)).max()
    turns = [engine.generate(PROMPT, Sampling(1.0, seed), 48) for seed in range(4)]
    errors: list[float] = []
    for turn in await asyncio.gather(*turns):
        assert [span.policy for span in turn.spans] == [update.policy]
        whole = np.concatenate([PROMPT, turn.token_ids])
        expected = reference_logprobs(model, whole)[len(PROMPT) - 1 :]
        errors.append(float(np.abs(turn.logprobs - expected).max()))
    return float(off), max(errors)


async def errors_of(engine: Engine, folder: Path, model: PreTrainedModel) -> list[float]:
    """Return the errors at the first weights and after an update of every one of them."""
    errors: list[float] = []
    for version, each in enumerate((model, perturbed(model, 1)), 1):
        update = publish(each, folder / f"v{version}.safetensors", version)
        errors += await largest_error(engine, each, update)
    return errors


def serve_by_two_workers(folder: Path, results: Connection) -> None:
    """A rollout whose engine has two workers, until it is killed."""

    async def serve() -> None:
        model = make_sparse_model(folder)
        engine = await start_tiny_engine(folder, tensor_parallel=2)
        errors = await errors_of(engine, folder, model)
        processes = psutil.Process().children(recursive=True)
        results.send((errors, [(each.pid, each.name()) for each in processes]))
        await asyncio.sleep(10_000)

    asyncio.run(serve())


def test_two_workers_follow_the_weights_and_end_with_a_rollout_that_is_killed(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    rollout = context.Process(target=serve_by_two_workers, args=(tmp_path / "model", there))
    rollout.start()
    there.close()
    try:
        errors, processes = here.recv()
        alive = [psutil.Process(pid) for pid, _ in processes]
    finally:
        rollout.kill()
        rollout.join()
    assert max(errors) < TOLERANCE
    assert sum("Worker_TP" in name for _, name in processes) == 2
    _, left = psutil.wait_procs(alive, timeout=END_S)
    assert not left


def load_for_long(folder: Path) -> None:
    """A rollout whose engine is loading, until it is killed."""
    make_sparse_model(folder)
    asyncio.run(start_tiny_engine(folder))


def test_a_rollout_that_is_killed_while_vllm_loads_leaves_no_process(tmp_path: Path) -> None:
    rollout = multiprocessing.get_context("spawn").Process(
        target=load_for_long, args=(tmp_path / "model",)
    )
    rollout.start()
    assert rollout.pid is not None
    try:
        cores = wait_for_cores(rollout.pid)
        # It imports vLLM for some seconds before it can react.
        time.sleep(1.0)
    finally:
        rollout.kill()
        rollout.join()
    _, left = psutil.wait_procs(cores, timeout=END_S)
    for each in left:
        each.kill()
    assert not left


def wait_for_cores(rollout: int) -> list[psutil.Process]:
    """Return the processes of multiprocessing's that a rollout has started, once there are any."""
    ends = time.monotonic() + 200.0
    while time.monotonic() < ends:
        children = psutil.Process(rollout).children(recursive=True)
        if cores := [each for each in children if "spawn_main" in " ".join(command_of(each))]:
            return cores
        time.sleep(0.05)
    raise AssertionError("vLLM has started no process")


async def test_two_engines_follow_the_weights_and_end_with_one_that_dies(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model = make_sparse_model(folder)
    engine = await start_tiny_engine(folder, data_parallel=2)
    try:
        cores = [p for p in psutil.Process().children() if "EngineCore" in p.name()]
        before = [sum(core.cpu_times()[:2]) for core in cores]
        assert max(await errors_of(engine, tmp_path, model)) < TOLERANCE
        assert len(cores) == 2
        after = [sum(core.cpu_times()[:2]) for core in cores]
        assert all(now > then for now, then in zip(after, before, strict=True)), "one was idle"
        os.kill(cores[1].pid, signal.SIGKILL)
        reason = await asyncio.wait_for(engine.wait_until_dead(), END_S)
        assert reason == "engine 1 of this replica: vLLM's engine process has ended"
    finally:
        await engine.close()
    _, left = psutil.wait_procs(cores, timeout=END_S)
    assert not left

"""Machines of an engine that are lost, or never come: the replica ends in seconds and names the
cause; a remaining machine joins the next one."""

import asyncio
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from flotilla_rollout.ports import EngineDead
from flotilla_rollout.types import Sampling
from tests.rollout.adapters.tiny_engines import PROMPT, TOLERANCE
from tests.rollout.nodes.head_process import canary_error
from tests.rollout.nodes.machines import HOST, Head, config_of, head, left_of, read, start_machine
from tests.support.tiny_model import load_model, make_model, publish

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(560),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

NOTICED_S = 20.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    return tmp_path / "model"


async def start_sampling(rollout: Head) -> asyncio.Task[object]:
    """Load weights, and have a long turn under way."""
    assert rollout.engine is not None
    first = publish(load_model(rollout.served.folder), rollout.folder / "first", 1)
    await rollout.engine.load_weights(first, Path(first.location))
    turn = rollout.engine.generate(PROMPT, Sampling(1.0, 1), 900)
    sampling = asyncio.ensure_future(turn)
    await asyncio.sleep(0.2)
    return sampling


def strike(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


async def reason_of_death(rollout: Head) -> str:
    """Return the reason of the engine's death, which must be known in time."""
    assert rollout.engine is not None
    started = time.monotonic()
    reason = await asyncio.wait_for(rollout.engine.wait_until_dead(), 60)
    assert time.monotonic() - started < NOTICED_S
    return reason


async def end_turn(turn: asyncio.Task[object]) -> None:
    turn.cancel()
    await asyncio.wait({turn})


async def test_a_killed_worker_ends_the_engine_and_its_machine_joins_the_next_until_that_is_killed(
    model: Path, tmp_path: Path
) -> None:
    async with head(tmp_path, model, config_of()) as rollout:
        machine = await rollout.machine()
        await rollout.start()
        turn = await start_sampling(rollout)
        [worker] = machine.workers()
        log = tmp_path / "machine-1" / "run" / "logs" / "rollout-0-node-1-worker-0.log"
        with log.open("a") as file:
            file.write("its last words")
        worker.kill()
        assert "its last words" in await reason_of_death(rollout)
        await end_turn(turn)
        await rollout.lose()
        # Another engine, on the remaining machine.
        await rollout.start()
        assert machine.process.returncode is None
        turn = await start_sampling(rollout)
        strike([psutil.Process(machine.process.pid), *machine.everything()], signal.SIGKILL)
        assert "machine 1 (" in await reason_of_death(rollout)
        await end_turn(turn)
        await rollout.close()
    assert left_of(tmp_path) == []


async def test_a_machine_that_stands_still_ends_the_engine(model: Path, tmp_path: Path) -> None:
    async with head(tmp_path, model, config_of()) as rollout:
        machine = await rollout.machine()
        await rollout.start()
        turn = await start_sampling(rollout)
        everything = [psutil.Process(machine.process.pid), *machine.everything()]
        try:
            strike(everything, signal.SIGSTOP)
            assert "machine 1 (" in await reason_of_death(rollout)
            await end_turn(turn)
        finally:
            strike(everything, signal.SIGKILL)


async def test_a_machine_joins_the_next_head_when_one_is_killed_and_leaves_nothing_of_it(
    model: Path, tmp_path: Path
) -> None:
    config = config_of()
    machine = await start_machine(tmp_path / "machine", config, model)
    killed = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.rollout.nodes.head_process", str(model)),
        *(str(tmp_path), HOST, str(config.ray_port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert float((await read(killed, "serves"))[0]) < TOLERANCE
        everything = psutil.Process(killed.pid).children(recursive=True)
        workers = machine.workers()
        killed.kill()
        _, left = psutil.wait_procs([*everything, *workers], timeout=30)
        assert not left
        async with head(tmp_path, model, config) as rollout:
            rollout.further.append(machine)
            assert await canary_error(rollout) < TOLERANCE
        assert await machine.ended() == 0
    finally:
        for process in (killed, machine.process):
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert left_of(tmp_path / "machine") == []


async def test_a_machine_with_another_token_is_refused_and_the_replica_names_who_is_missing(
    model: Path, tmp_path: Path
) -> None:
    async with head(tmp_path, model, config_of(join_s=30.0)) as rollout:
        starting = asyncio.create_task(rollout.start())
        machine = await rollout.machine(token="a-token-of-strangers")
        assert await machine.ended(60) == 2
        assert "the rollout's Ray cluster refuses this machine" in machine.output
        missing = r"machine 1 of 2 has not joined in 30 s: run `python -m flotilla_rollout\.nodes"
        with pytest.raises(EngineDead, match=missing):
            await starting


async def test_a_machine_that_the_engine_does_not_count_ends(model: Path, tmp_path: Path) -> None:
    machine = await start_machine(tmp_path / "machine", config_of(), model, number=2)
    assert await machine.ended() == 2
    assert "--replica 2: rollout.engine.nodes is 2" in machine.output

"""Real vLLM whose process is killed or stopped while weights are sent into it: it is dead, serves
nothing any more, and the engine beside it has every publication."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from flotilla_common.domain.policy import PolicyId
from flotilla_rollout.ports import EngineDead
from flotilla_rollout.types import Completion
from tests.rollout.adapters.test_vllm_transfer import FAILING, Served, offered, sending, serving
from tests.rollout.adapters.tiny_engines import PROMPT
from tests.support.process_commands import command_of
from tests.support.tiny_model import load_model
from tests.support.waiting import until

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(560),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]
CORE = "VLLM::EngineCore"
# The piece at which the engine has begun to load.
PIECE = 3
PATIENCE_S = 240.0
# The time limit of an update; that of a stopped engine takes all of it.
LIMITS_S = {"kill": PATIENCE_S, "stop": 20.0}


def cores() -> set[psutil.Process]:
    """Return the processes that hold the models of this process's engines."""
    children = psutil.Process().children(recursive=True)
    return {each for each in children if any(CORE in word for word in command_of(each))}


@asynccontextmanager
async def two_engines(
    folder: Path, scratch: Path
) -> AsyncGenerator[tuple[Served, Served, psutil.Process]]:
    """Serve by two engines; the third is the second one's process."""
    for name in ("other", "victim"):
        (scratch / name).mkdir()
    async with serving(folder, load_model(folder), scratch / "other") as other:
        others = cores()
        async with serving(folder, load_model(folder), scratch / "victim") as victim:
            [core] = cores() - others
            yield other, victim, core
            assert await victim.engine.wait_until_dead()
        await until(lambda: has_ended(core), PATIENCE_S)


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_an_engine_that_fails_as_it_receives_is_dead_and_the_other_continues(
    engine_folder: Path, tmp_path: Path, how: str
) -> None:
    async with two_engines(engine_folder, tmp_path) as (other, victim, core):
        first = victim.next_update()
        await victim.engine.load_weights(first, Path(first.location))
        async with sending(tmp_path, FAILING, f"{how}-{PIECE}-{core.pid}") as (sender, address):
            update = replace(victim.next_update(), timeout_s=LIMITS_S[how])
            sent = await offered(sender, address, update)
            turn = victim.begin_turn()
            receiving = asyncio.create_task(victim.engine.receive_weights(sent))
            await until(lambda: has_failed(core), PATIENCE_S)
            for _ in range(2):
                mine = other.next_update()
                await other.engine.receive_weights(await offered(sender, address, mine))
                await other.check_serves(mine)
            reason = "process has ended" if how == "kill" else "has not ended after 20 s"
            with pytest.raises(EngineDead, match=reason):
                await receiving
            if how == "stop":
                core.resume()
        assert victim.engine.policy is None
        with pytest.raises(EngineDead):
            await victim.engine.compute_logprobs(PROMPT)
        await check_is_unmixed(turn, first.policy)
        if how == "stop":
            # It is closed like this if no caller resumes it.
            core.suspend()


async def check_is_unmixed(turn: asyncio.Task[Completion], policy: PolicyId) -> None:
    """Check that a turn that was under way is of the old policy, or got no answer."""
    await asyncio.wait({turn}, timeout=2.0)
    if not turn.done():
        turn.cancel()
    elif turn.exception() is None:
        assert [span.policy for span in turn.result().spans] == [policy]
    else:
        assert isinstance(turn.exception(), EngineDead)


def has_failed(core: psutil.Process) -> bool:
    """Return True once a process is dead or stopped."""
    return has_ended(core) or core.status() == psutil.STATUS_STOPPED


def has_ended(core: psutil.Process) -> bool:
    """Return True once a process is dead, reaped or not."""
    try:
        return core.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

"""Real vLLM whose engine process is killed or stopped while weights are sent into it: it serves
nothing that is mixed, and the engine beside it has every publication."""

import asyncio
from pathlib import Path

import psutil
import pytest

from services.rollout.ports import EngineDead, WeightsTorn
from tests.rollout.adapters.test_vllm_transfer import (
    FAILING,
    Served,
    offered,
    sending,
    serving,
)
from tests.support.fake_peers import until
from tests.support.process_commands import command_of
from tests.support.tiny_model import load_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(230),
    # What vLLM and torch warn about at import is theirs to mend.
    pytest.mark.filterwarnings("default"),
]
CORE = "VLLM::EngineCore"
# At which piece: once the engine has begun to load.
PIECE = 3
PATIENCE_S = 120.0


def cores() -> set[psutil.Process]:
    """The processes that hold the models of this process's engines."""
    return {
        each
        for each in psutil.Process().children(recursive=True)
        if any(CORE in word for word in command_of(each))
    }


async def check_goes_on(served: Served, folder: Path) -> None:
    """An engine is sent another publication, and serves it."""
    async with sending(folder) as (sender, address):
        update = served.next_update()
        await served.engine.receive_weights(await offered(sender, address, update))
        await served.check_serves(update)


async def test_an_engine_that_is_killed_in_the_middle_is_dead_and_the_other_goes_on(
    engine_folder: Path, tmp_path: Path
) -> None:
    model, other_scratch = load_model(engine_folder), tmp_path / "other"
    other_scratch.mkdir()
    async with serving(engine_folder, model, other_scratch) as other:
        others = cores()
        async with serving(engine_folder, model, tmp_path) as victim:
            await check_goes_on(victim, tmp_path)
            [core] = cores() - others
            run = f"kill-{PIECE}-{core.pid}"
            async with sending(tmp_path, FAILING, run) as (sender, address):
                update = victim.next_update()
                with pytest.raises(EngineDead):
                    await victim.engine.receive_weights(await offered(sender, address, update))
                assert victim.engine.policy is None
                mine = other.next_update()
                await other.engine.receive_weights(await offered(sender, address, mine))
                await other.check_serves(mine)


async def test_an_engine_that_is_stopped_in_the_middle_serves_nothing_until_it_is_loaded_whole(
    engine_folder: Path, tmp_path: Path
) -> None:
    model, other_scratch = load_model(engine_folder), tmp_path / "other"
    other_scratch.mkdir()
    async with serving(engine_folder, model, other_scratch) as other:
        others = cores()
        async with serving(engine_folder, model, tmp_path) as victim:
            await check_goes_on(victim, tmp_path)
            [core] = cores() - others
            run = f"stop-{PIECE}-{core.pid}"
            async with sending(tmp_path, FAILING, run) as (sender, address):
                sent = await offered(sender, address, victim.next_update())
                receiving = asyncio.create_task(victim.engine.receive_weights(sent))
                await until(lambda: core.status() == psutil.STATUS_STOPPED, PATIENCE_S)
                for _ in range(2):
                    mine = other.next_update()
                    await other.engine.receive_weights(await offered(sender, address, mine))
                    await other.check_serves(mine)
                log = tmp_path / "sender.log"
                await until(lambda: "an engine is lost" in log.read_text(), PATIENCE_S)
                core.resume()
                with pytest.raises(WeightsTorn):
                    await receiving
            assert victim.engine.policy is None
            whole = victim.next_update()
            await victim.engine.load_weights(whole, Path(whole.location))
            await victim.check_serves(whole)
            await check_goes_on(victim, tmp_path)

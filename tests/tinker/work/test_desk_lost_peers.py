"""A desk whose trainer and engine are killed again and again: results are those without kills."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.process.child_environment import child_environment
from flotilla_common.rpc import rpc
from flotilla_common.rpc.free_ports import free_address
from flotilla_tinker.adapters.sampling_peer import GrpcSamplingPeer
from flotilla_tinker.adapters.training_peer import GrpcTrainingPeer
from flotilla_tinker.types import Failure, Kind, Pending
from flotilla_tinker.work.desk import Desk, open_desk
from flotilla_tinker.work.limits import Limits
from tests.support.fake_peers import TOKEN
from tests.support.process_forge import shared_forge
from tests.support.repository import ROOT
from tests.support.started_process import start_process
from tests.tinker.work.desk_doubles import JsonWire, an_order
from tests.tinker.work.test_desk_kills import work_of

FEWEST_KILLS = 10
MODULE = "tests.tinker.work.killed_peers"
# Kills that no order causes are no reason to give one up.
LIMITS = Limits(most_deaths=10**6, recovery_updates=2, free_disk_bytes=0)


class KilledPeers:
    """A process with both peers, at one address, that is started again after each kill."""

    def __init__(self) -> None:
        self.address = free_address()
        self.kills = 0
        self._start()

    def _start(self) -> None:
        command = shared_forge(MODULE).python_command("-m", MODULE, self.address)
        environment = {**child_environment(), "PYTHONPATH": f"{ROOT}:{ROOT}/gen"}
        self.process, _ = start_process(command, env=environment, cwd=ROOT)

    def kill(self) -> None:
        self.end()
        self.kills += 1
        self._start()

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


async def carry_out(desk: Desk, session: str) -> list[str]:
    """Return the results of all orders, sent concurrently."""

    async def finish(order: dict[str, Any]) -> str:
        asked = an_order(
            Kind(order["kind"]), session, order["place"], order["seq"], **order["body"]
        )
        accepted = await desk.submit(asked)
        while isinstance(outcome := await desk.wait("ann", accepted.request_id, 60), Pending):
            pass
        text = outcome.message if isinstance(outcome, Failure) else outcome.body.decode()
        return text.replace(session, "SESSION")

    orders = work_of(session)
    created = [order for order in orders if order["kind"] == "create_model"]
    rest = [order for order in orders if order not in created]
    return [
        *[await finish(order) for order in created],
        *await asyncio.gather(*map(finish, rest)),
    ]


async def results_of(folder: Path, peers: KilledPeers, *, kill: bool) -> list[str]:
    done = asyncio.Event()

    async def keep_killing() -> None:
        while kill and not done.is_set():
            await asyncio.sleep(random.uniform(0.05, 0.3))
            await asyncio.to_thread(peers.kill)

    async with rpc.channel(peers.address, token=TOKEN) as channel:
        trainer, engine = GrpcTrainingPeer(channel), GrpcSamplingPeer(channel)
        async with open_desk(folder, trainer, engine, JsonWire(), limits=LIMITS) as desk:
            session = await desk.open_session("ann", {})
            killing = asyncio.create_task(keep_killing())
            found = await carry_out(desk, session)
            # Not cancelled: its thread would start a process that nobody ends.
            done.set()
            await killing
            return found


@pytest.mark.slow
async def test_results_are_the_same_if_the_peers_are_killed(tmp_path: Path) -> None:
    peers = KilledPeers()
    try:
        expected = await results_of(tmp_path / "calm", peers, kill=False)
        found = await results_of(tmp_path / "killed", peers, kill=True)
        assert found == expected
        assert not [text for text in found if "died" in text or "internal" in text]
        assert peers.kills >= FEWEST_KILLS
    finally:
        peers.end()

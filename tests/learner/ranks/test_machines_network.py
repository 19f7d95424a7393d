"""Ranks on two machines with a network between them; and what happens when it goes."""

import asyncio
import re
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from flotilla_common.process.python_command import python_command
from flotilla_launcher.security import certificates
from flotilla_learner.ports import RankError
from flotilla_learner.ranks import rank_process
from flotilla_learner.ranks.local_ranks import LocalRanks
from flotilla_learner.ranks.pending_calls import RankHandle
from flotilla_learner.ranks.rank_process import RankProcess
from tests.learner.ranks.nodes import RUN, config_of, left_of, start_machine
from tests.learner.ranks.test_machines import one_machine
from tests.support.rank_configs import policy_config
from tests.support.two_machines import (
    HOST,
    NAMES,
    drop_connections,
    inside,
    pull_cable,
    two_machines,
)
from tests.support.waiting import until


@pytest.fixture
def network() -> Generator[None]:
    with two_machines():
        yield


async def _wait_for(process: asyncio.subprocess.Process, word: str) -> list[str]:
    """The rest of the next line that begins with the word; log lines are skipped."""
    assert process.stdout is not None
    async with asyncio.timeout(300):
        while line := (await process.stdout.readline()).decode():
            if line.startswith(f"{word} "):
                return line.split()[1:]
    raise AssertionError(f"it ended before it printed {word!r}")


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("network")
async def test_machines_train_over_a_network_and_end_in_seconds_when_it_goes(
    model_folder: Path, tmp_path: Path
) -> None:
    # Beyond loopback nothing is dialled without.
    certificates.store_identity(tmp_path, certificates.mint_identity(RUN))
    tls = str(certificates.identity_folder(tmp_path, RUN) / "learner")
    config = config_of(2, rank={"join_s": 60.0})
    learner = await asyncio.create_subprocess_exec(
        *(*inside(NAMES[0]), sys.executable, "-m", "tests.learner.ranks.head_process"),
        *(str(model_folder), str(tmp_path), HOST, str(config.rank.ray_port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    machine = await start_machine(
        *(tmp_path / "machine", config, policy_config(model_folder), "--tls-dir", tls),
        host=HOST,
        inside=inside(NAMES[1]),
    )
    try:
        (fingerprint,) = await _wait_for(learner, "trained")
        _, expected = await one_machine(tmp_path, model_folder, 2)
        assert fingerprint == expected.fingerprint.hex()
        pull_cable()
        assert learner.stdin is not None
        learner.stdin.write(b"continue\n")
        seconds, *why = await _wait_for(learner, "lost")
        assert float(seconds) < 20 and "machine 1" in " ".join(why)
        assert await asyncio.wait_for(learner.wait(), 30) == 0
        # Its node has ended with the connection; it waits for another learner.
        await until(lambda: len(left_of(tmp_path / "machine")) == 1, 60.0)
        machine.process.terminate()
        assert await machine.ended() == 0
        assert left_of(tmp_path / "machine") == []
    finally:
        for process in (learner, machine.process):
            if process.returncode is None:
                process.kill()
                await process.wait()


class CableRendezvous:
    """Rendezvous of a rank on each of the two machines, without Ray. Then their network
    drops all connections, but for those to the store if that is `store_open`."""

    spans_machines = True

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, *, store_open: bool) -> None:
        self._folder = folder
        self._patch = patch
        self._store_open = store_open
        self.move_to(NAMES[0])

    def move_to(self, machine: str) -> None:
        """Start the next ranks on a machine."""

        def command(*words: str) -> tuple[str, ...]:
            return (*inside(machine), *python_command(*words))

        self._patch.setattr(rank_process, "python_command", command)

    async def wait_for_remote_ranks(self) -> Sequence[RankHandle]:
        self.move_to(NAMES[1])
        return [await RankProcess.spawn_rank("rank 1", self._folder / "rank-1.log", {})]

    async def open_address(self, first: RankHandle) -> str:
        address = (await first.send_command("host", {"host": HOST}))["rendezvous"]
        drop_connections(open_port=int(address.rpartition(":")[2]) if self._store_open else None)
        return address


@pytest.mark.slow
@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("store_open", [True, False])
async def test_ranks_whose_connections_are_dropped_name_each_other_and_the_fix(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, store_open: bool
) -> None:
    meeting = CableRendezvous(tmp_path, monkeypatch, store_open=store_open)
    config, policy, shm = config_of(2), policy_config(model_folder), tmp_path / "shm"
    shm.mkdir()
    ranks = LocalRanks(RUN, policy, config, tmp_path / "rank-0.log", shm, meeting)
    started = time.monotonic()
    try:
        with pytest.raises(RankError) as raised:
            await ranks.start_ranks(None)
    finally:
        await ranks.close()
    assert time.monotonic() - started < 60
    why = str(raised.value).splitlines()[0]
    there, dropped = r"10\.77\.0\.{}:\d+ \(nothing comes back in 10 s\)".format, "cannot reach rank"
    if store_open:
        assert re.search(f"rank 0 at {HOST} {dropped} 1 at {there(2)}", why)
        assert re.search(f"rank 1 at 10.77.0.2 {dropped} 0 at {there(1)}", why)
    else:
        assert re.search(f"this machine {dropped} 0 at {there(1)}", why)
    assert "let all TCP ports through" in why and "NCCL_SOCKET_IFNAME" in why and "cable0" in why

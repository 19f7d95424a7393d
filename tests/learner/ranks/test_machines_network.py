"""Ranks on two machines with a network between them; and what happens when it goes."""

import asyncio
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from services.launcher.security import certificates
from tests.learner.ranks.nodes import RUN, config_of, left_of, start_machine
from tests.learner.ranks.test_machines import one_machine
from tests.support.rank_configs import policy_config
from tests.support.two_machines import HOST, NAMES, inside, pull_cable, two_machines
from tests.support.waiting import until


@pytest.fixture
def network() -> Generator[None]:
    with two_machines():
        yield


async def _wait_for(process: asyncio.subprocess.Process, word: str) -> list[str]:
    """The rest of the next line that begins with the word; log lines are skipped."""
    assert process.stdout is not None
    async with asyncio.timeout(120):
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

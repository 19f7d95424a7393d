"""An engine on two machines with a network between them, which then fails."""

import asyncio
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from flotilla_launcher.security import certificates
from tests.rollout.adapters.tiny_engines import TOLERANCE
from tests.rollout.nodes.machines import RUN, config_of, left_of, read, start_machine
from tests.support.tiny_model import make_model
from tests.support.two_machines import HOST, NAMES, inside, pull_cable, two_machines
from tests.support.waiting import until


@pytest.fixture
def network() -> Generator[None]:
    with two_machines():
        yield


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(560)
@pytest.mark.usefixtures("network")
async def test_an_engine_serves_over_a_network_and_ends_in_seconds_when_it_goes(
    tmp_path: Path,
) -> None:
    model, config = tmp_path / "model", config_of()
    make_model(model)
    # Connections beyond loopback require an identity.
    certificates.store_identity(tmp_path, certificates.mint_identity(RUN))
    tls = str(certificates.identity_folder(tmp_path, RUN) / "rollout")
    rollout = await asyncio.create_subprocess_exec(
        *(*inside(NAMES[0]), sys.executable, "-m", "tests.rollout.nodes.head_process"),
        *(str(model), str(tmp_path), HOST, str(config.ray_port)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    machine = await start_machine(
        *(tmp_path / "machine", config, model, "--tls-dir", tls),
        host=HOST,
        inside=inside(NAMES[1]),
    )
    try:
        assert float((await read(rollout, "serves"))[0]) < TOLERANCE
        pull_cable()
        assert rollout.stdin is not None
        rollout.stdin.write(b"continue\n")
        seconds, *why = await read(rollout, "lost")
        assert float(seconds) < 20 and "machine 1 (" in " ".join(why)
        assert await asyncio.wait_for(rollout.wait(), 60) == 0
        # Its node has ended with the connection; it waits for another rollout.
        await until(lambda: len(left_of(tmp_path / "machine")) <= 1)
        machine.process.terminate()
        assert await machine.ended() == 0
        assert left_of(tmp_path / "machine") == []
    finally:
        for process in (rollout, machine.process):
            if process.returncode is None:
                process.kill()
                await process.wait()

"""The health of a launcher, as reported to a container engine."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from flotilla_common.rpc.free_ports import free_port
from tests.launcher.api.test_run_service_remote import launcher
from tests.support.launcher_process import address_of
from tests.support.outsiders import beyond_loopback

# The address is reserved for documents: nothing answers there.
NOWHERE = "192.0.2.1:443"


async def request(runs: Path) -> tuple[int | None, str]:
    """Exit code and output of the command that the image has."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "flotilla_launcher.cli.healthcheck", "--timeout", "2"),
        cwd=runs.parent,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode().strip()


async def test_a_launcher_beyond_loopback_is_healthy_by_the_certificate_of_its_clients(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    async with launcher(runs, "--listen", "0.0.0.0:0", "--advertise", beyond_loopback()) as process:
        port = (await address_of(runs, process)).address.rpartition(":")[2]
        assert await request(runs) == (0, f"127.0.0.1:{port}: serving")


async def test_a_launcher_is_healthy_where_it_is_and_not_where_others_reach_it(
    tmp_path: Path,
) -> None:
    runs, port = tmp_path / "runs", free_port()
    async with launcher(runs, "--listen", f"0.0.0.0:{port}", "--advertise", NOWHERE) as process:
        assert (await address_of(runs, process)).address == NOWHERE
        assert await request(runs) == (0, f"127.0.0.1:{port}: serving")


async def test_a_launcher_on_loopback_is_healthy_until_it_hangs_or_is_gone(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert await request(runs) == (1, "no launcher is running for runs")
    async with launcher(runs) as process:
        address = await address_of(runs, process)
        assert await request(runs) == (0, f"{address.address}: serving")
        os.kill(address.pid, signal.SIGSTOP)
        code, message = await request(runs)
        os.kill(address.pid, signal.SIGCONT)
        assert (code, message.partition(": ")[0]) == (1, address.address)
    assert await request(runs) == (1, "no launcher is running for runs")

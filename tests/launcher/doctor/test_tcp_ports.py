"""Ports that are taken, and an address that does not lead back."""

import json
import socket
from contextlib import closing
from pathlib import Path

from flotilla_launcher.doctor.findings import Status
from tests.support.doctor import ProbeResult, check, probed, spec, subject


async def test_ports_that_are_taken_are_named(policy: Path, tasks: Path, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        emulated = json.dumps(
            ["python", "-m", "flotilla_environments.fleet_emulator", "--port", str(port)]
        )
        content = spec(
            *(policy, tasks, "env_gateway.backend=fleet"),
            f"env_gateway.backends.fleet.command={emulated}",
        )
        local = await probed("ports", subject(content, tmp_path))
        registry = (f"launcher.sky.registry_port={port}", "launcher.backend=sky")
        sky = await probed("ports", subject(spec(policy, tasks, *registry), tmp_path))
        weights = spec(policy, tasks, f"learner.weights.port={port}")
        published = await probed("ports", subject(weights, tmp_path))
    check(local, Status.FAIL, f"port {port} cannot be had", "env_gateway.backends.fleet.command")
    check(sky, Status.FAIL, f"port {port} cannot be had", "or change launcher.sky.registry_port")
    check(published, Status.FAIL, f"port {port} cannot be had", "or change learner.weights.port")
    free = await probed("ports", subject(weights, tmp_path))
    check(free, Status.OK, f"free: {port} (learner.weights.port)")


async def test_an_advertised_address_must_lead_back_to_this_machine(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    async def advertise(host: str) -> ProbeResult:
        content = spec(policy, tasks, "launcher.backend=sky", f"launcher.sky.advertise={host}")
        return await probed("ports", subject(content, tmp_path))

    wrong = await advertise("no-such-host.invalid")
    check(wrong, Status.FAIL, "no-such-host.invalid:", "set launcher.sky.advertise to an address")
    check(await advertise("127.0.0.1"), Status.OK)

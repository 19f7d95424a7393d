"""A launcher that serves RunService to other machines: only to holders of its certificates."""

import asyncio
import json
import os
import signal
import stat
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_common.rpc import rpc
from flotilla_common.rpc.free_ports import free_port
from flotilla_launcher.__main__ import add_registry
from flotilla_launcher.api.registry_server import GrpcRegistryHost
from flotilla_launcher.cli.interrupts import Interrupts
from flotilla_launcher.cli.launcher_client import connect_to_launcher
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.control.launcher import Launcher, LauncherDependencies
from flotilla_launcher.ports import NO_HOOKS
from flotilla_launcher.security import certificates
from flotilla_launcher.store.ledger import Ledger
from tests.launcher.cli.test_launcher_client import cli
from tests.support.every_rpc import of_service, refusals
from tests.support.launcher import forged_command, forged_fakes
from tests.support.launcher_process import address_of
from tests.support.outsiders import RUN, beyond_loopback, member, outsiders, run


@asynccontextmanager
async def launcher(runs: Path, *arguments: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    """A launcher whose fakes are forks of a forge, as it is itself."""
    process = await asyncio.create_subprocess_exec(
        *forged_command("-m", "flotilla_launcher", "--runs", str(runs), *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **forged_fakes()},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


async def test_launcher_json_lets_only_its_reader_in(tmp_path: Path) -> None:
    served = ("--listen", "0.0.0.0:0", "--advertise", beyond_loopback())
    async with launcher(tmp_path, *served) as process:
        address = await address_of(tmp_path, process)
        assert address.address.startswith(f"{beyond_loopback()}:")
        assert address.tls is not None
        assert stat.S_IMODE((tmp_path / "launcher.json").stat().st_mode) == 0o600
        async with connect_to_launcher(tmp_path, Interrupts(), start=False) as found:
            assert (await found.stub.ListRuns(pb.ListRunsRequest(), timeout=5)).runs == []
        rpcs = of_service("RunService")
        for who, opened in outsiders().items():
            async with opened(address.address, "launcher") as channel:
                codes = await refusals(channel, rpcs, token=address.token)
            assert codes == {each.path: grpc.StatusCode.UNAVAILABLE for each in rpcs}, who
        for token in (None, "a-token-of-another-run"):
            channel = rpc.plain_channel(address.address, tls=address.tls, peer="launcher")
            async with channel:
                codes = await refusals(channel, rpcs, token=token)
            assert codes == {each.path: grpc.StatusCode.UNAUTHENTICATED for each in rpcs}


async def test_a_copy_of_launcher_json_is_good_for_the_launchers_after_it(tmp_path: Path) -> None:
    served = ("--listen", f"0.0.0.0:{free_port()}", "--advertise", beyond_loopback())
    async with launcher(tmp_path, *served) as killed:
        address = await address_of(tmp_path, killed)
        copy = (tmp_path / "launcher.json").read_text()
        os.kill(address.pid, signal.SIGKILL)
        await killed.wait()
    async with launcher(tmp_path, *served) as second:
        await address_of(tmp_path, second)
        async with cli(copy, "cancel", "mine") as process:
            output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, output.decode()) == (
        0,
        "request mine began no run, and never will\n",
    )


async def test_on_loopback_launcher_json_holds_no_certificate(tmp_path: Path) -> None:
    async with launcher(tmp_path) as process:
        address = await address_of(tmp_path, process)
        assert address.tls is None
        assert "tls" not in json.loads((tmp_path / "launcher.json").read_text())


async def test_an_address_that_clients_cannot_use_is_refused_at_once(tmp_path: Path) -> None:
    async with launcher(tmp_path, "--listen", "0.0.0.0:0") as process:
        _, output = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 1
    assert "pass --advertise HOST" in output.decode()


@pytest.mark.parametrize("backend", ["local", "sky"])
async def test_a_runs_registry_has_tls_where_its_replicas_are_elsewhere(
    tmp_path: Path, backend: str
) -> None:
    added: list[str] = []
    registries = GrpcRegistryHost(tmp_path, lambda run_id, server: added.append(run_id))
    config = LauncherConfig.model_validate(
        {"backend": backend, "sky": {"advertise": beyond_loopback()}}
    )
    registry = await registries.open_registry("run", config, "")
    try:
        secrets = registry.secrets_for("rollout")
        assert ("FLOTILLA_TLS" in secrets) == (backend == "sky") == registry.encrypted
        tls = registry.member.tls_for("rollout") if registry.encrypted else None
        async with rpc.plain_channel(registry.address, tls=tls, peer="launcher") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert await check(b"", timeout=5) == b"\x08\x01"
    finally:
        await registries.close("run", forget=True)
    assert added == ["run"]
    assert not (tmp_path / ".identity" / "run").exists()


@asynccontextmanager
async def registry_of_a_run(runs: Path) -> AsyncGenerator[str]:
    """The address of the registry that a launcher serves to other machines."""
    certificates.store_identity(runs, run())
    store = Ledger(runs / "launcher.sqlite")
    registries = GrpcRegistryHost(runs, lambda run_id, server: add_registry(served, run_id, server))
    served = Launcher(runs, store, LauncherDependencies({}, registries, NO_HOOKS))
    sky = {"advertise": beyond_loopback()}
    config = LauncherConfig.model_validate({"backend": "sky", "sky": sky})
    try:
        yield (await registries.open_registry(RUN, config, "")).address
    finally:
        await registries.close(RUN, forget=True)
        store.close()


async def test_every_rpc_of_a_runs_registry_needs_the_runs_certificate_and_its_token(
    tmp_path: Path,
) -> None:
    rpcs = of_service("RegistryService")
    assert len(rpcs) == 5
    async with registry_of_a_run(tmp_path) as address:
        for who, opened in outsiders().items():
            async with opened(address, "launcher") as channel:
                codes = await refusals(channel, rpcs, token=run().token)
            assert codes == {each.path: grpc.StatusCode.UNAVAILABLE for each in rpcs}, who
        for token in (None, "a-token-of-another-run"):
            async with member(address, "launcher") as channel:
                codes = await refusals(channel, rpcs, token=token)
            assert codes == {each.path: grpc.StatusCode.UNAUTHENTICATED for each in rpcs}
        async with member(address, "launcher") as channel:
            codes = await refusals(channel, rpcs, token=run().token)
        # A member of a run that the launcher does not know gets through.
        assert codes == {each.path: grpc.StatusCode.NOT_FOUND for each in rpcs}

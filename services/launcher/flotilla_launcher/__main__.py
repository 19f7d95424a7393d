"""Entry point of a launcher: `python -m flotilla_launcher`. `flotilla train` starts one
automatically."""

import argparse
import asyncio
import fcntl
import sys
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import grpc.aio

from flotilla.launcher.v1 import registry_service_pb2_grpc, run_service_pb2_grpc
from flotilla_common.aio.concurrency import running_tasks, wait_for_event
from flotilla_common.process.private_process import keep_private
from flotilla_common.process.stop_signals import StopSignals
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.network_addresses import advertised_address, is_loopback, split_host_port
from flotilla_common.telemetry import log
from flotilla_common.text.printable_text import print_visible
from flotilla_common.text.redaction import add_secret
from flotilla_launcher.api.registry_server import GrpcRegistryHost
from flotilla_launcher.api.registry_service import RegistryService
from flotilla_launcher.api.run_service import RunService
from flotilla_launcher.backends.local.backend import LocalBackend
from flotilla_launcher.backends.ports import Backend, BackendError, BackendFactories
from flotilla_launcher.control.budget import meter_cost
from flotilla_launcher.control.evaluation_analyses import analyzed_runs
from flotilla_launcher.control.event_publisher import EventPublisher
from flotilla_launcher.control.launcher import Launcher, LauncherDependencies
from flotilla_launcher.doctor.run_inputs import pin_model
from flotilla_launcher.doctor.start_gate import doctor_gate
from flotilla_launcher.notify.adapters.build_sinks import make_sink
from flotilla_launcher.notify.notifier import open_notifier
from flotilla_launcher.ports import LauncherHooks
from flotilla_launcher.security import certificates, launcher_address
from flotilla_launcher.store.ledger import Ledger, LedgerError

_CLOSE_GRACE_S = 30.0
_IDLE_CHECK_S = 0.5


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flotilla_launcher",
        description="Starts, watches and ends runs; serves RunService and RegistryService.",
        epilog="SIGTERM drains all runs and exits; a second SIGTERM kills them at once.",
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of all runs")
    parser.add_argument(
        "--listen",
        default="127.0.0.1:0",
        help="host:port; port 0: any free port. Beyond loopback, launcher.json holds a certificate",
    )
    parser.add_argument(
        "--advertise", metavar="HOST[:PORT]", help="address that clients use, if not --listen"
    )
    parser.add_argument(
        "--idle-exit", type=float, metavar="SECONDS", help="exit after this long without a run"
    )
    return parser


@contextmanager
def hold_folder_lock(runs: Path) -> Generator[bool]:
    """Hold the folder's lock; yield False if another launcher holds it. The lock of a dead
    launcher is free."""
    with (runs / "launcher.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Settings of a serving launcher."""

    runs: Path
    listen: str
    advertise: str | None
    idle_exit: float | None
    backends: BackendFactories
    hooks: LauncherHooks


async def serve_launcher(options: ServeOptions) -> None:
    """Take over the runs of a dead launcher, then serve until a stop signal."""
    stop, runs = asyncio.Event(), options.runs
    store = Ledger(runs / "launcher.sqlite")
    # Registries need the launcher, which needs registries.
    registries = GrpcRegistryHost(
        runs, lambda run_id, server: add_registry(launcher, run_id, server)
    )
    launcher = Launcher(
        runs, store, LauncherDependencies(options.backends, registries, options.hooks)
    )

    StopSignals(lambda _number: stop.set(), lambda _number: launcher.end_all_now()).handle_in_loop()
    await launcher.recover_runs()
    publisher = EventPublisher(store, options.hooks.observers)
    async with (
        running_tasks(publisher.publish_forever(), launcher.watch_for_orphans()),
        _serve_runs(options, launcher),
    ):
        await _wait_until_stopped_or_idle(stop, launcher, options.idle_exit)
        await launcher.close(_CLOSE_GRACE_S)
    await publisher.publish_pending()
    store.close()


@asynccontextmanager
async def _serve_runs(options: ServeOptions, launcher: Launcher) -> AsyncGenerator[None]:
    """Serve RunService and publish launcher.json for its clients; beyond loopback use TLS."""
    own = certificates.load_launcher_identity(options.runs)
    add_secret(own.token)
    server = rpc.server(token=own.token)
    run_service_pb2_grpc.add_RunServiceServicer_to_server(RunService(launcher), server)
    alone_here = is_loopback(split_host_port(options.listen, "listen")[0])
    tls = None if alone_here else own.tls_for(certificates.LAUNCHER)
    client = None if alone_here else own.tls_for(certificates.CLIENT)
    at = rpc.serving(server, options.listen, tls=tls, advertise=options.advertise, grace_s=1.0)
    async with at as serving:
        serving.set_serving(True)
        there = (options.runs, serving.address, own.token, client)
        with launcher_address.published_address(*there, listen=options.listen):
            yield


async def serve_and_notify(options: ServeOptions) -> None:
    """Serve, analyze the runs' evaluations, and notify people about the runs, up to the last
    message."""
    async with (
        open_notifier(options.runs, make_sink) as notifier,
        analyzed_runs(options.runs),
    ):
        hooks = replace(options.hooks, observers=(*options.hooks.observers, notifier))
        await serve_launcher(replace(options, hooks=hooks))


def add_registry(launcher: Launcher, run_id: str, server: grpc.aio.Server) -> None:
    registry = RegistryService(launcher, run_id=run_id)
    registry_service_pb2_grpc.add_RegistryServiceServicer_to_server(registry, server)


def backend_factories(runs: Path) -> BackendFactories:
    """Return a factory for each value of `launcher.backend`."""
    return {"local": lambda: LocalBackend(runs), "sky": lambda: _make_sky_backend(runs)}


def _make_sky_backend(runs: Path) -> Backend:
    from flotilla_launcher.backends.sky.backend import SkyBackend
    from flotilla_launcher.backends.sky.sdk import SkyClient

    # An installed launcher has no repository of its own; use the one it was started in.
    here = Path.cwd()
    root = here if (here / ".git").exists() else Path(__file__).parents[3]
    return SkyBackend(runs, root=root, client=SkyClient())


async def _wait_until_stopped_or_idle(
    stop: asyncio.Event, launcher: Launcher, idle_exit: float | None
) -> None:
    while not stop.is_set():
        idle_s = time.monotonic() - launcher.idle_since
        if idle_exit is not None and launcher.is_idle and idle_s > idle_exit:
            return
        await wait_for_event(stop, _IDLE_CHECK_S)


def main() -> int:
    """Run a launcher and return its exit code.

    Exit codes: 0 stopped on request; 1 another launcher holds the folder, or a bad setup."""
    keep_private()
    given = build_parser().parse_args()
    runs = Path(given.runs).resolve()
    runs.mkdir(parents=True, exist_ok=True)
    log.setup("launcher", "")
    with hold_folder_lock(runs) as alone_here:
        if not alone_here:
            print_visible(f"error: another launcher is running for {runs}", file=sys.stderr)
            return 1
        options = ServeOptions(
            runs=runs,
            listen=given.listen,
            advertise=given.advertise,
            idle_exit=given.idle_exit,
            backends=backend_factories(runs),
            hooks=LauncherHooks(pin=pin_model, gate=doctor_gate, meter=meter_cost),
        )
        try:
            # Check the address before taking over the runs of a dead launcher.
            advertised_address(split_host_port(given.listen, "listen")[0], 0, given.advertise)
            asyncio.run(serve_and_notify(options))
        except (BackendError, ConfigError, LedgerError, OSError) as error:
            print_visible(f"error: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

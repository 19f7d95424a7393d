"""Watches over one replica on this machine: `python -m services.launcher.agent ... -- COMMAND`."""

import asyncio
import os
import shlex
import shutil
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.common import log, rpc
from services.common.config import load_spec, parse
from services.common.errors import ConfigError
from services.common.private_process import keep_private
from services.common.text import say
from services.launcher.agent.adapters.launcher_client import Sender, UnitRegistry
from services.launcher.agent.agent import Parts, Prepare, Watcher
from services.launcher.agent.arguments import Arguments, parse_arguments
from services.launcher.agent.decisions import Watch
from services.launcher.agent.log_uploader import Beside, Outbox
from services.launcher.agent.parent_death_reaper import guarded
from services.launcher.agent.ports import Notices
from services.launcher.agent.preemption import UNTOLD_LEFT_S, AnyNotices, FileNotices
from services.launcher.agent.run_folder import RunFolder
from services.launcher.backends.local.backend import LocalBackend
from services.launcher.config.launcher import LauncherConfig
from services.launcher.config.sky import SkyConfig
from services.launcher.ports import Launch
from services.launcher.security.env_filter import inherited
from services.launcher.security.sealed_secrets import unseal
from services.launcher.security.secret_files import Handover, handed_over
from services.launcher.state import EXIT_BAD_CONFIG, LEARNER, Policy

# Ctrl-C and a scheduler reach a whole session: signals so close are one wish.
_SAME_SIGNAL_S = 0.5
# How long what a killed watcher left here may take to end.
_LEFT_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of this watcher."""

    arguments: Arguments
    config: LauncherConfig
    # Of the run's uploads, if it has any.
    url: str | None
    # Names of variables that the replica gets, besides what any process of ours does.
    inherits: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """The watcher's own. Not in the run's, which a restored run must not find there."""
        run_dir = self.arguments.run_dir
        return run_dir.with_name(f".{run_dir.name}.units")


def read_wish(arguments: Arguments) -> Wish:
    """The command line and the spec that it names. Raises ConfigError."""
    spec = load_spec(arguments.config)
    table, where = spec.get("launcher", {}), str(arguments.config)
    config = parse(LauncherConfig, table, where=where, section="launcher")
    inherits = inherited(spec, config, arguments.here[0])
    return Wish(arguments, config, _uploads(spec, arguments.run_id), inherits)


def _uploads(spec: Mapping[str, Any], run_id: str) -> str | None:
    remote = spec.get("learner", {}).get("checkpoint", {}).get("remote")
    return None if remote is None else f"{remote}/{run_id}"


def _uses_spot(config: SkyConfig, service: str) -> bool:
    machines = {"learner": config.learner, "env_gateway": config.env_gateway}
    candidates = machines.get(service, config.rollout).candidates
    return any(machine.use_spot for machine in candidates)


async def watch(wish: Wish, secrets: Handover) -> int:
    """See the replica through; returns the exit code."""
    await _end_leftovers(wish)
    async with _watcher(wish, secrets) as watcher:
        _obey_signals(watcher)
        ending = await watcher.run()
    say(f"{wish.arguments.here[0]} ended with code {ending.code}", file=sys.stderr)
    return ending.shell_code


@asynccontextmanager
async def _watcher(wish: Wish, secrets: Handover) -> AsyncGenerator[Watcher]:
    given, config = wish.arguments, wish.config
    incarnation = uuid.uuid4().hex
    channel = rpc.channel(
        given.registry,
        token=secrets.token,
        wait_for_ready=secrets.tls is None,
        tls=secrets.tls,
        peer="launcher",
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(channel)
        sender = Sender(given.run_id, given.key, incarnation, given.node)
        launcher = UnitRegistry(channel, sender)
        beside = Beside(given.run_dir / "logs", given.key, given.node)
        outbox = Outbox(launcher, wish.folder, given.label, incarnation, beside)
        launch = Launch(
            run_id=given.run_id,
            key=given.here,
            command=(*given.command, *secrets.arguments),
            secrets={},
            log=outbox.log,
            inherits=wish.inherits,
        )
        parts = Parts(
            launch=launch,
            processes=LocalBackend(wish.folder),
            launcher=launcher,
            notices=await _notices(wish, stack),
            outbox=outbox,
            prepare=_prepare(wish, outbox.log, config.policy()),
            hostname=socket.gethostname(),
            resume=given.resume,
        )
        yield Watcher(Watch(time.monotonic(), config.sky.unit_lease_s, config.policy()), parts)


async def _end_leftovers(wish: Wish) -> None:
    """End what a watcher that was killed left running of this very replica."""
    processes = LocalBackend(wish.folder)
    name = f"{wish.arguments.run_id}/{wish.arguments.label}"
    for unit in await processes.orphans([]):
        if unit.name.startswith(f"{name}#"):
            await processes.end(unit, _LEFT_GRACE_S)


def _clean(wish: Wish, secrets: Handover) -> None:
    """What is left when the watcher is gone, if it was killed."""
    asyncio.run(_end_leftovers(wish))
    shutil.rmtree(secrets.folder, ignore_errors=True)


async def _notices(wish: Wish, stack: AsyncExitStack) -> Notices:
    sources: list[Notices] = []
    if wish.arguments.notice_file is not None:
        sources.append(FileNotices(wish.arguments.notice_file))
    if _uses_spot(wish.config.sky, wish.arguments.key[0]):
        from services.launcher.agent.adapters.spot_notice import MetadataNotices

        metadata = MetadataNotices(wish.arguments.metadata_url)
        stack.push_async_callback(metadata.close)
        sources.append(metadata)
    return AnyNotices(sources)


def _prepare(wish: Wish, log_path: Path, policy: Policy) -> Prepare:
    given = wish.arguments
    folder = RunFolder(given.run_dir, wish.url, given.config, log_path, wish.inherits)

    async def prepare(begun: bool) -> None:
        # Its further machines have no files of the run.
        if wish.arguments.here[0] == LEARNER:
            await folder.ready(begun, policy)

    return prepare


def _obey_signals(watcher: Watcher) -> None:
    """SIGTERM that the launcher did not announce is somebody else who wants the machine, and who
    does not say when it goes."""
    first: list[float] = []

    def on_signal() -> None:
        if not first:
            first.append(time.monotonic())
            watcher.lose_machine(UNTOLD_LEFT_S)
        elif time.monotonic() - first[0] > _SAME_SIGNAL_S:
            watcher.hurry()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)


def main() -> int:
    """Exit codes: see `arguments`."""
    arguments = parse_arguments(sys.argv[1:])
    service, replica = arguments.key
    try:
        wish = read_wish(arguments)
        handed = unseal(os.environ, arguments.seal_key)
        # What came sealed is for this service, whatever it is for.
        wish = replace(wish, inherits=(*wish.inherits, *handed))
        with handed_over() as secrets, guarded(lambda: _clean(wish, secrets)):
            log.setup(f"unit-{service}", arguments.run_id, replica=replica)
            log.get_logger(__name__).info("watching", command=shlex.join(arguments.command))
            return asyncio.run(watch(wish, secrets))
    except ConfigError as error:
        say(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG


if __name__ == "__main__":
    keep_private()
    sys.exit(main())

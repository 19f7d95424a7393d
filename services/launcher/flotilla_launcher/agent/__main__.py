"""Entry point of the agent that watches one replica on this machine:
`python -m flotilla_launcher.agent ... -- COMMAND`."""

import asyncio
import os
import shlex
import shutil
import socket
import sys
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from flotilla_common.process.private_process import keep_private
from flotilla_common.process.stop_signals import StopSignals
from flotilla_common.rpc import rpc
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec_loading import load_spec
from flotilla_common.telemetry import log
from flotilla_common.text.printable_text import print_visible
from flotilla_launcher.agent.adapters.launcher_client import AgentIdentity, GrpcLauncherLink
from flotilla_launcher.agent.agent import DEFAULT_LEFT_S, Prepare, Watcher, WatcherDependencies
from flotilla_launcher.agent.arguments import Arguments, parse_arguments
from flotilla_launcher.agent.decisions import WatchState
from flotilla_launcher.agent.log_uploader import LogUploader, SideLogs
from flotilla_launcher.agent.parent_death_reaper import cleaned_up_after_death
from flotilla_launcher.agent.ports import PollNotice
from flotilla_launcher.agent.run_folder import RunFolder
from flotilla_launcher.backends.local.backend import LocalBackend
from flotilla_launcher.backends.ports import LaunchSpec
from flotilla_launcher.config.launcher import LauncherConfig
from flotilla_launcher.run_spec import RunSpec, read_spec
from flotilla_launcher.security.sealed_secrets import unseal_secrets
from flotilla_launcher.security.secret_files import SecretFiles, secrets_in_files
from flotilla_launcher.security.service_variables import inherited_variables
from flotilla_launcher.state import EXIT_BAD_CONFIG, LEARNER

# Ctrl-C and schedulers signal the whole session: signals this close count as one.
_SAME_SIGNAL_S = 0.5
# Time that leftovers of a killed watcher may take to end.
_LEFT_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """One watcher's task: its command line and its settings from the run spec."""

    arguments: Arguments
    config: LauncherConfig
    # Address of the run's uploads, if it has any.
    url: str | None
    # Variables that the replica inherits besides those of every process of ours.
    inherits: tuple[str, ...]

    @property
    def folder(self) -> Path:
        """The watcher's own folder, outside the run's, where a restored run must not find it."""
        run_dir = self.arguments.run_dir
        return run_dir.with_name(f".{run_dir.name}.units")


def read_agent_spec(arguments: Arguments) -> AgentSpec:
    """Read the command line and the spec that it names. Raises ConfigError."""
    spec = read_spec(load_spec(arguments.config), str(arguments.config))
    inherits = inherited_variables(spec, arguments.here[0])
    return AgentSpec(arguments, spec.config, _uploads_url(spec, arguments.run_id), inherits)


def _uploads_url(spec: RunSpec, run_id: str) -> str | None:
    remote = spec.tables.get("learner", {}).get("checkpoint", {}).get("remote")
    return None if remote is None else f"{remote}/{run_id}"


async def watch_replica(agent_spec: AgentSpec, secrets: SecretFiles) -> int:
    """Watch the replica to its end; return the exit code."""
    await _end_leftovers(agent_spec)
    async with _open_watcher(agent_spec, secrets) as watcher:
        _obey_signals(watcher)
        ending = await watcher.watch_to_end()
    print_visible(f"{agent_spec.arguments.here[0]} ended with code {ending.code}", file=sys.stderr)
    return ending.shell_code


@asynccontextmanager
async def _open_watcher(agent_spec: AgentSpec, secrets: SecretFiles) -> AsyncGenerator[Watcher]:
    given, config = agent_spec.arguments, agent_spec.config
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
        sender = AgentIdentity(given.run_id, given.key, incarnation, given.node)
        launcher = GrpcLauncherLink(channel, sender)
        beside = SideLogs(given.run_dir / "logs", given.key, given.node)
        uploader = LogUploader(launcher, agent_spec.folder, given.label, incarnation, beside)
        launch = LaunchSpec(
            run_id=given.run_id,
            key=given.here,
            command=(*given.command, *secrets.arguments),
            secrets={},
            log=uploader.log,
            inherits=agent_spec.inherits,
        )
        parts = WatcherDependencies(
            launch=launch,
            processes=LocalBackend(agent_spec.folder),
            launcher=launcher,
            notices=await _open_notices(agent_spec, stack),
            uploader=uploader,
            prepare=_make_prepare(agent_spec, uploader.log),
            hostname=socket.gethostname(),
            resume=given.resume,
        )
        lease_s, drain_s = config.sky.unit_lease_s, config.drain_s
        yield Watcher(WatchState(time.monotonic(), lease_s, drain_s), parts)


async def _end_leftovers(agent_spec: AgentSpec) -> None:
    """End the processes of this replica that a killed watcher left running."""
    processes = LocalBackend(agent_spec.folder)
    name = f"{agent_spec.arguments.run_id}/{agent_spec.arguments.label}"
    for unit in await processes.list_units():
        if unit.replica_name == name:
            await processes.end_orphan(unit, _LEFT_GRACE_S)


def _clean_up(agent_spec: AgentSpec, secrets: SecretFiles) -> None:
    """Clean up after a watcher that was killed: its processes and its secrets."""
    asyncio.run(_end_leftovers(agent_spec))
    shutil.rmtree(secrets.folder, ignore_errors=True)


async def _open_notices(agent_spec: AgentSpec, stack: AsyncExitStack) -> list[PollNotice]:
    polls: list[PollNotice] = []
    if agent_spec.arguments.notice_file is not None:
        polls.append(_poll_file(agent_spec.arguments.notice_file))
    machines = agent_spec.config.sky.machines_for(agent_spec.arguments.key[0])
    if any(machine.use_spot for machine in machines.candidates):
        from flotilla_launcher.agent.adapters.spot_notice import MetadataNotices

        metadata = MetadataNotices(agent_spec.arguments.metadata_url)
        stack.push_async_callback(metadata.close)
        polls.append(metadata.poll_notice)
    return polls


def _poll_file(path: Path) -> PollNotice:
    """Return the poll of a file that a scheduler's hook or an operator creates."""

    async def poll() -> float | None:
        return DEFAULT_LEFT_S if await asyncio.to_thread(path.exists) else None

    return poll


def _make_prepare(agent_spec: AgentSpec, log_path: Path) -> Prepare:
    given = agent_spec.arguments
    folder = RunFolder(given.run_dir, agent_spec.url, given.config, log_path, agent_spec.inherits)

    async def prepare_folder(begun: bool) -> None:
        # Further machines have no files of the run.
        if agent_spec.arguments.here[0] == LEARNER:
            await folder.ensure_ready(begun)

    return prepare_folder


def _obey_signals(watcher: Watcher) -> None:
    """Install the signal handlers.

    A SIGTERM that the launcher did not announce means that the machine is being taken away at an
    unknown time."""
    StopSignals(
        lambda _number: watcher.lose_machine(DEFAULT_LEFT_S),
        lambda _number: watcher.end_now(),
        same_s=_SAME_SIGNAL_S,
    ).handle_in_loop()


def main() -> int:
    """Run the agent; return its exit code, as listed in `arguments`."""
    arguments = parse_arguments(sys.argv[1:])
    service, replica = arguments.key
    try:
        agent_spec = read_agent_spec(arguments)
        handed = unseal_secrets(os.environ, arguments.seal_key)
        # All sealed variables are meant for this service.
        agent_spec = replace(agent_spec, inherits=(*agent_spec.inherits, *handed))
        with (
            secrets_in_files() as secrets,
            cleaned_up_after_death(lambda: _clean_up(agent_spec, secrets)),
        ):
            log.setup(f"unit-{service}", arguments.run_id, replica=replica)
            log.get_logger(__name__).info("watching", command=shlex.join(arguments.command))
            return asyncio.run(watch_replica(agent_spec, secrets))
    except ConfigError as error:
        print_visible(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_CONFIG


if __name__ == "__main__":
    keep_private()
    sys.exit(main())

"""Backend of this machine: every replica is a subprocess in a session of its own.

Replicas carry a mark in their environment. Their children are in their session or inherit the mark,
so that all processes of a replica can be found and ended even without its leader."""

import asyncio
import os
import secrets
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil

from flotilla_common.process.child_environment import child_environment
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.network_addresses import join_host_port
from flotilla_common.weights.shared_memory import remove_folders, shared_name
from flotilla_launcher.backends.local.gpu_reservations import GpuReservations, visible_gpus
from flotilla_launcher.backends.local.marked_processes import (
    MARK_VARIABLE,
    find_members,
    is_alive,
    is_running,
    kill_members,
    mark_of,
    start_time_of,
)
from flotilla_launcher.backends.local.own_address import check_further_machines, find_own_host
from flotilla_launcher.backends.ports import (
    Backend,
    BackendError,
    CleanupEvidence,
    DeviceClaim,
    LaunchSpec,
    QueuePlace,
    ResourceOffer,
)
from flotilla_launcher.security.token_pipe import token_in_pipe
from flotilla_launcher.state import ExitStatus, Unit
from flotilla_launcher.store.logs import read_last_lines

_POLL_S = 0.1
_NEWEST = Unit("", started=float("inf"))


class LocalBackend(Backend):
    """Backend that starts replicas as subprocesses. Those of the folder `runs` belong to this
    launcher."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs.resolve()
        self._owner = str(self._runs)
        # Logs of the units, with their processes unless another launcher started them.
        self._started: dict[Unit, tuple[asyncio.subprocess.Process | None, Path]] = {}
        self._gpus = GpuReservations(self._owner, visible_gpus())

    async def offer_resources(self, launch: LaunchSpec) -> ResourceOffer:
        total = len(self._gpus.visible)
        if launch.gpus > total:
            raise BackendError(
                f"{launch.key[0]} requests {launch.gpus} GPUs per replica, this machine has {total}"
            )
        check_further_machines(launch)
        _address_arguments(launch)
        text = f"{launch.gpus} of {total} GPUs" if launch.gpus else f"{os.cpu_count()} shared CPUs"
        return ResourceOffer(f"this machine, {text}")

    async def claim_devices(self, claim: DeviceClaim) -> QueuePlace | None:
        if not claim.count:
            return None
        claiming = asyncio.create_task(asyncio.to_thread(self._gpus.claim_gpus, claim))
        try:
            return await asyncio.shield(claiming)
        finally:
            # A release by a cancelled caller must come after it.
            await asyncio.wait({claiming})

    async def release_devices(self, run_id: str, label: str = "") -> None:
        await asyncio.to_thread(self._gpus.release_gpus, run_id, label)

    async def start_replica(self, launch: LaunchSpec) -> Unit:
        # Unique to each start: ending the leftovers of one must not hit the next.
        name = f"{launch.name}#{secrets.token_hex(4)}"
        check_further_machines(launch)
        address = _address_arguments(launch)
        gpus = await asyncio.to_thread(
            self._gpus.assign_gpus, launch.run_id, launch.label, launch.gpus
        )
        own = {MARK_VARIABLE: f"{self._owner}:{name}", **gpus}
        launch.log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with launch.log.open("ab") as log, token_in_pipe(launch.secrets) as handed:
                process = await asyncio.create_subprocess_exec(
                    *(*launch.command, *address, *handed.arguments),
                    pass_fds=handed.descriptors,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=asyncio.subprocess.STDOUT,
                    env={**child_environment(*launch.inherits, ours=True), **own},
                    start_new_session=True,
                )
        except OSError as error:
            raise BackendError(f"cannot start {launch.name}: {error}") from error
        unit = Unit(name, process.pid, start_time_of(process.pid))
        self._started[unit] = (process, launch.log)
        if any(launch.spec.config.gpu_counts().values()):
            await asyncio.to_thread(self._gpus.note_unit, launch.run_id, launch.label, unit)
        return unit

    async def attach_replica(self, launch: LaunchSpec, unit: Unit) -> bool:
        if not is_alive(unit):
            return False
        if unit not in self._started:
            self._started[unit] = (None, launch.log)
        return True

    async def wait_for_exit(self, unit: Unit) -> ExitStatus:
        process, log = self._started.get(unit, (None, None))
        code = None if process is None else await process.wait()
        # The end of another launcher's process cannot be awaited: it is not a child.
        while process is None and is_alive(unit):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        await self._kill_leftovers(unit)
        self._started.pop(unit, None)
        return ExitStatus(code, await asyncio.to_thread(read_last_lines, log) if log else "")

    async def drain_replica(self, unit: Unit) -> None:
        """Send SIGTERM to the leader alone: it ends its children in the right order."""
        if is_alive(unit):
            with suppress(ProcessLookupError):
                os.kill(unit.pid, signal.SIGTERM)

    async def kill_replica(self, unit: Unit) -> None:
        if is_alive(unit):
            with suppress(ProcessLookupError):
                os.killpg(unit.pid, signal.SIGKILL)
        await self._kill_leftovers(unit)

    async def list_units(self, known: Collection[Unit] = ()) -> list[Unit]:
        marked = await asyncio.to_thread(self._find_marked)
        left = await asyncio.to_thread(self._find_running, known)
        return list({**marked, **left}.values())

    async def clean_run(self, run_id: str) -> CleanupEvidence:
        evidence = await super().clean_run(run_id)
        folders = await asyncio.to_thread(remove_folders, shared_name(run_id, self._runs / run_id))
        left = ", ".join(filter(None, [evidence.detail, *map(str, folders)]))
        if left:
            return CleanupEvidence(False, f"still on this machine: {left}")
        await self.release_devices(run_id)
        return CleanupEvidence(True, "no process and no shared memory is left on this machine")

    async def _kill_leftovers(self, unit: Unit) -> None:
        """Kill the remaining processes of a replica (SIGKILL), and wait until they are gone."""
        await asyncio.to_thread(kill_members, unit, f"{self._owner}:{unit.name}")

    def _find_running(self, known: Collection[Unit]) -> dict[str, Unit]:
        """Find the known units with a running process.

        A process that renames itself, as an engine's does, may overwrite its mark, but it stays in
        the session of a leader that is gone."""
        return {
            unit.name: unit
            for unit in known
            if any(map(is_running, find_members(unit, f"{self._owner}:{unit.name}")))
        }

    def _find_marked(self) -> dict[str, Unit]:
        """Find the running replicas of this runs folder by name, each as its oldest process:
        children may lead sessions of their own, as a learner's ranks do."""
        found: dict[str, Unit] = {}
        for process in psutil.process_iter():
            mark = mark_of(process)
            if not mark.startswith(f"{self._owner}:"):
                continue
            name = mark.removeprefix(f"{self._owner}:")
            with suppress(psutil.NoSuchProcess, ProcessLookupError):
                unit = Unit(name, process.pid, process.create_time())
                ended = process.status() == psutil.STATUS_ZOMBIE
                if not ended and unit.started < found.get(name, _NEWEST).started:
                    found[name] = unit
        return found


def _address_arguments(launch: LaunchSpec) -> tuple[str, ...]:
    """Return the listen arguments of a replica with further machines; none for others. Raises
    BackendError."""
    try:
        host = find_own_host(launch.spec.config)
    except ConfigError as error:
        raise BackendError(str(error)) from error
    listens = host and "--listen" not in launch.command
    return ("--listen", join_host_port(host, 0)) if listens else ()

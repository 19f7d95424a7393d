"""Backend of this machine: every replica is a subprocess in a session of its own.

Replicas carry a mark in their environment. All they start is in their session or carries the
mark too, so that everything of a replica can be found and ended, whatever became of its leader."""

import asyncio
import os
import secrets
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

import psutil

from services.common.child_environment import child_environment
from services.common.errors import ConfigError
from services.common.network_addresses import join_host_port
from services.common.shared_memory import remove_folders, shared_name
from services.launcher.backends.local.gpu_slots import GpuSlots, gpus_of, visible_gpus
from services.launcher.backends.local.marked_processes import (
    MARK_VARIABLE,
    find_members,
    is_alive,
    is_running,
    kill_members,
    mark_of,
    start_time_of,
    wait_until_gone,
)
from services.launcher.backends.local.own_address import check_further_machines, find_own_host
from services.launcher.backends.ports import (
    BackendError,
    CleanupEvidence,
    LaunchSpec,
    OrphanResource,
    ResourceOffer,
)
from services.launcher.security.token_pipe import token_in_pipe
from services.launcher.state import ExitStatus, Unit
from services.launcher.store.logs import read_last_lines

_POLL_S = 0.1
_NEWEST = Unit("", started=float("inf"))


class LocalBackend:
    """Backend that starts replicas as subprocesses. `runs` is the folder whose replicas are
    ours."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs.resolve()
        self._owner = str(self._runs)
        self._processes: dict[Unit, tuple[asyncio.subprocess.Process, Path]] = {}
        # Started by an earlier launcher: not our children.
        self._attached: dict[Unit, Path] = {}
        self._gpus = GpuSlots(visible_gpus())

    async def offer_resources(self, launch: LaunchSpec) -> ResourceOffer:
        total = self._gpus.total
        if launch.gpus > total:
            raise BackendError(
                f"{launch.key[0]} asks for {launch.gpus} GPUs per replica, this machine has {total}"
            )
        check_further_machines(launch)
        _address_arguments(launch)
        text = f"{launch.gpus} of {total} GPUs" if launch.gpus else f"{os.cpu_count()} shared CPUs"
        return ResourceOffer(f"this machine, {text}")

    async def start_replica(self, launch: LaunchSpec) -> Unit:
        # New for each start: ending what is left of one start must not hit the next.
        name = f"{launch.name}#{secrets.token_hex(4)}"
        check_further_machines(launch)
        address = _address_arguments(launch)
        own = {MARK_VARIABLE: f"{self._owner}:{name}", **self._gpus.take_gpus(name, launch.gpus)}
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
            self._gpus.release_gpus(name)
            raise BackendError(f"cannot start {launch.name}: {error}") from error
        except asyncio.CancelledError:
            self._gpus.release_gpus(name)
            raise
        unit = Unit(name, process.pid, start_time_of(process.pid))
        self._processes[unit] = (process, launch.log)
        return unit

    async def attach_replica(self, launch: LaunchSpec, unit: Unit) -> bool:
        if not is_alive(unit):
            return False
        if unit not in self._processes:
            self._attached[unit] = launch.log
            self._gpus.reclaim_gpus(unit.name, gpus_of(unit.pid) if launch.gpus else [])
        return True

    async def find_replica(self, launch: LaunchSpec) -> Unit | None:
        marked = await asyncio.to_thread(self._find_marked)
        found = (unit for name, unit in marked.items() if name.startswith(f"{launch.name}#"))
        return next(filter(is_alive, found), None)

    async def undo_start(self, launch: LaunchSpec) -> None:
        unit = await self.find_replica(launch)
        if unit is not None and await self.attach_replica(launch, unit):
            await self.kill_replica(unit)
            await self.wait_for_exit(unit)

    async def price_per_hour(self, launch: LaunchSpec) -> float | None:
        return None

    async def wait_for_exit(self, unit: Unit) -> ExitStatus:
        if unit in self._attached:
            return await self._wait_for_attached(unit)
        process, log = self._processes[unit]
        code = await process.wait()
        await self._kill_leftovers(unit)
        self._gpus.release_gpus(unit.name)
        del self._processes[unit]
        return ExitStatus(code, await asyncio.to_thread(read_last_lines, log))

    async def _wait_for_attached(self, unit: Unit) -> ExitStatus:
        while True:
            if not is_alive(unit):
                break
            await asyncio.sleep(_POLL_S)
        await self._kill_leftovers(unit)
        self._gpus.release_gpus(unit.name)
        log = self._attached.pop(unit)
        return ExitStatus(None, await asyncio.to_thread(read_last_lines, log))

    async def drain_replica(self, unit: Unit) -> None:
        """Send SIGTERM to the leader alone: it knows in which order its children must end."""
        if is_alive(unit):
            with suppress(ProcessLookupError):
                os.kill(unit.pid, signal.SIGTERM)

    async def kill_replica(self, unit: Unit) -> None:
        if is_alive(unit):
            with suppress(ProcessLookupError):
                os.killpg(unit.pid, signal.SIGKILL)
        await self._kill_leftovers(unit)

    async def list_orphans(self, known: Collection[Unit]) -> list[Unit]:
        marked = await asyncio.to_thread(self._find_marked)
        left = await asyncio.to_thread(self._find_running, known)
        return list({**marked, **left}.values())

    async def end_orphan(self, unit: Unit, grace_s: float) -> None:
        await self.drain_replica(unit)
        # It is not our child, so its end cannot be awaited otherwise.
        await asyncio.to_thread(wait_until_gone, unit, grace_s)
        await self.kill_replica(unit)

    async def clean_run(self, run_id: str) -> CleanupEvidence:
        await self._end_marked(lambda name: name.startswith(f"{run_id}/"))
        left = await asyncio.to_thread(self._list_remains, run_id)
        if left:
            return CleanupEvidence(False, f"still on this machine: {', '.join(left)}")
        return CleanupEvidence(True, "no process and no shared memory is left on this machine")

    async def list_orphan_resources(self, active: Collection[str]) -> list[OrphanResource]:
        marked = await asyncio.to_thread(self._find_marked)
        return [
            OrphanResource(name, _run_id_of(name), f"process {unit.pid}")
            for name, unit in marked.items()
            if _run_id_of(name) not in active
        ]

    async def reap_orphans(self, active: Collection[str]) -> list[str]:
        return await self._end_marked(lambda name: _run_id_of(name) not in active)

    async def _end_marked(self, chosen: Callable[[str], bool]) -> list[str]:
        marked = await asyncio.to_thread(self._find_marked)
        units = [unit for name, unit in marked.items() if chosen(name)]
        await asyncio.gather(*(self.kill_replica(unit) for unit in units))
        return [unit.name for unit in units]

    def _list_remains(self, run_id: str) -> list[str]:
        """Remove a run's shared memory; list the names of whatever is left of the run."""
        memory = remove_folders(shared_name(run_id, self._runs / run_id))
        names = (name for name in self._find_marked() if name.startswith(f"{run_id}/"))
        return sorted([*names, *map(str, memory)])

    async def _kill_leftovers(self, unit: Unit) -> None:
        """Kill whatever a replica started and did not end (SIGKILL), and wait until it is gone."""
        await asyncio.to_thread(kill_members, unit, f"{self._owner}:{unit.name}")

    def _find_running(self, known: Collection[Unit]) -> dict[str, Unit]:
        """Find those known units of which anything still runs.

        A process that names itself, as an engine's does, may have written over its mark; it is
        still in the session of a leader that is gone."""
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


def _run_id_of(name: str) -> str:
    """Return the run id in a replica's name."""
    return name.partition("/")[0]


def _address_arguments(launch: LaunchSpec) -> tuple[str, ...]:
    """Return where a replica listens whose further machines reach it; empty for any other.

    Raises BackendError."""
    try:
        host = find_own_host(launch.config)
    except ConfigError as error:
        raise BackendError(str(error)) from error
    listens = host and "--listen" not in launch.command
    return ("--listen", join_host_port(host, 0)) if listens else ()

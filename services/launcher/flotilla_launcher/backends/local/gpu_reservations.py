"""Reservations of this machine's GPUs, shared by all launchers of this user.

A GPU belongs to a run from its start to its end, whatever becomes of its replicas. The table is a
file in shared memory, which a reboot ends as it ends the runs, and is changed under a lock. A
reservation lasts as long as the run's launcher or any process of the run: the services of a killed
launcher keep their GPUs for its successor. Runs that find too few free ones wait in the same table,
by priority and then by submission, as long as their launcher lives."""

import fcntl
import os
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from flotilla_common.files.durable_files import replace_file
from flotilla_common.weights.shared_memory import SHARED_MEMORY
from flotilla_launcher.backends.local.marked_processes import (
    find_members,
    is_alive,
    is_running,
    mark_of,
    start_time_of,
)
from flotilla_launcher.backends.ports import BackendError, DeviceClaim, QueuePlace
from flotilla_launcher.state import Unit

# The number grows with every change of its content.
_TABLE = "reservations-1.json"


@dataclass(frozen=True, slots=True)
class Reservation:
    """GPUs that a run holds, each with the label of its replica or "" while it has none, and the
    number that it waits for; 0 if it does not wait."""

    folder: str
    run_id: str
    launcher: Unit
    priority: int = 0
    submitted: float = 0.0
    waits_for: int = 0
    # The GPUs that its launcher may use.
    among: tuple[str, ...] = ()
    gpus: dict[str, str] = field(default_factory=dict[str, str])
    # The newest unit of each replica, by its label.
    units: dict[str, Unit] = field(default_factory=dict[str, Unit])

    @property
    def key(self) -> tuple[str, str]:
        return (self.folder, self.run_id)

    @property
    def order(self) -> tuple[int, float, str]:
        """Its order in the queue."""
        return (-self.priority, self.submitted, self.run_id)

    def has_owner(self) -> bool:
        """Return whether its launcher lives, or any process of the run that holds GPUs."""
        return is_alive(self.launcher) or (bool(self.gpus) and self._has_processes())

    def _has_processes(self) -> bool:
        of_run = f"{self.folder}:{self.run_id}/"
        if any(mark_of(p).startswith(of_run) and is_running(p) for p in psutil.process_iter()):
            return True
        # A process that renames itself may overwrite its mark, but stays in its session.
        members = (find_members(u, f"{self.folder}:{u.name}") for u in self.units.values())
        return any(is_running(process) for found in members for process in found)


_TABLE_TYPE = TypeAdapter(list[Reservation])
Table = dict[tuple[str, str], Reservation]


class GpuReservations:
    """The table as one launcher uses it, for the runs of its folder, among the `visible` GPUs."""

    def __init__(self, folder: str, visible: Sequence[str]) -> None:
        self.visible = tuple(visible)
        self._folder = folder
        self._launcher = Unit("launcher", os.getpid(), start_time_of(os.getpid()))

    def claim_gpus(self, claim: DeviceClaim) -> QueuePlace | None:
        """Reserve the GPUs of a run, in addition to those that it holds, and free those that it
        holds beyond the claim and has not assigned.

        If too few are free, or others wait for them, return its place in the queue, where it stays
        if it waits. Raises BackendError if this machine never has as many."""
        if claim.count > len(self.visible):
            raise BackendError(
                f"the run needs {_count(claim.count)}, this machine has {len(self.visible)}"
            )
        with self._open_table() as table:
            known = table.get((self._folder, claim.run_id))
            mine = replace(
                known or Reservation(self._folder, claim.run_id, self._launcher),
                launcher=self._launcher,
                among=self.visible,
                priority=claim.priority,
                submitted=claim.submitted,
                waits_for=0,
            )
            spare = [gpu for gpu, label in mine.gpus.items() if not label]
            surplus = spare[: max(0, len(mine.gpus) - claim.count)]
            mine = replace(mine, gpus={g: at for g, at in mine.gpus.items() if g not in surplus})
            others = [each for each in table.values() if each.key != mine.key]
            free = self._free_gpus([*others, mine])
            lacking = claim.count - len(mine.gpus)
            ahead = sorted((r for r in others if _is_ahead(r, mine)), key=lambda r: r.order)
            place = None
            if lacking > 0 and (ahead or lacking > len(free)):
                place = QueuePlace(len(ahead) + 1, self._explain(lacking, free, others, ahead))
                mine = replace(mine, waits_for=claim.count if claim.waits else 0)
            else:
                mine = replace(mine, gpus={**mine.gpus, **dict.fromkeys(free[:lacking], "")})
            table[mine.key] = mine
            return place

    def assign_gpus(self, run_id: str, label: str, count: int) -> dict[str, str]:
        """Assign reserved GPUs to a replica, on every start the same; return the environment that
        limits it to them. Raises BackendError if the run holds too few."""
        if count == 0:
            return {}
        with self._open_table() as table:
            mine = table.get((self._folder, run_id))
            held = dict(mine.gpus) if mine else {}
            own = [gpu for gpu, at in held.items() if at == label]
            spare = [gpu for gpu, at in held.items() if not at]
            given = [*own, *spare][:count]
            if mine is None or len(given) < count:
                raise BackendError(f"{label} needs {_count(count)}, {len(given)} are reserved")
            table[mine.key] = replace(mine, gpus={**held, **dict.fromkeys(given, label)})
            return {"CUDA_VISIBLE_DEVICES": ",".join(given)}

    def note_unit(self, run_id: str, label: str, unit: Unit) -> None:
        """Record a process of a run: as long as it lives, the run keeps its GPUs."""
        with self._open_table() as table:
            mine = table.get((self._folder, run_id))
            if mine is not None:
                table[mine.key] = replace(mine, units={**mine.units, label: unit})

    def release_gpus(self, run_id: str, label: str = "") -> None:
        """Free the GPUs of one replica, or all of a run and its place in the queue."""
        if not _folder_path().exists():
            return
        with self._open_table() as table:
            mine = table.pop((self._folder, run_id), None)
            if mine is not None and label:
                kept = {gpu: at for gpu, at in mine.gpus.items() if at != label}
                table[mine.key] = replace(mine, gpus=kept)

    def _free_gpus(self, reservations: Sequence[Reservation]) -> list[str]:
        held = {gpu for each in reservations for gpu in each.gpus}
        return [gpu for gpu in self.visible if gpu not in held]

    def _explain(
        self,
        lacking: int,
        free: Sequence[str],
        others: Sequence[Reservation],
        ahead: Sequence[Reservation],
    ) -> str:
        """Name what a run waits for: the holders of the GPUs, and the runs ahead of it."""
        needs = f"needs {_count(lacking)}, {len(free)} of {len(self.visible)} are free"
        holders = [
            f"{self._name(each)} holds GPU {', '.join(seen)}"
            for each in others
            if (seen := [gpu for gpu in each.gpus if gpu in self.visible])
        ]
        waiting = [f"{self._name(each)} waits before it" for each in ahead]
        return ": ".join(filter(None, [needs, "; ".join([*holders, *waiting])]))

    def _name(self, other: Reservation) -> str:
        elsewhere = f" in {other.folder}" if other.folder != self._folder else ""
        unattended = "" if is_alive(other.launcher) else ", whose launcher is gone,"
        return f"run {other.run_id}{elsewhere}{unattended}"

    @contextmanager
    def _open_table(self) -> Generator[Table]:
        """Yield the table without reservations of dead owners, and write it back if it changed."""
        folder = _make_folder()
        path = folder / _TABLE
        with (folder / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            written = path.read_bytes() if path.exists() else b"[]"
            known = _TABLE_TYPE.validate_json(written)
            table = {each.key: each for each in known if each.has_owner()}
            yield table
            kept = [each for each in table.values() if each.gpus or each.waits_for]
            data = _TABLE_TYPE.dump_json(kept)
            if data != written:
                replace_file(path, data, mode=0o600)


def _is_ahead(other: Reservation, mine: Reservation) -> bool:
    """Return whether a waiting run comes before this one, for any of the same GPUs."""
    competes = not set(other.among).isdisjoint(mine.among)
    return bool(other.waits_for) and competes and other.order < mine.order


def _folder_path() -> Path:
    return SHARED_MEMORY / f"flotilla-gpus-{os.geteuid()}"


def _make_folder() -> Path:
    """Return the folder of the table, which other users cannot write. Raises BackendError if one
    of them has taken its name."""
    path = _folder_path()
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise BackendError(
            f"{path} holds this user's GPU reservations, and is not theirs: remove it"
        )
    return path


def _count(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"


def visible_gpus() -> list[str]:
    """List the GPUs this process may use, as CUDA_VISIBLE_DEVICES names them."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return [gpu.strip() for gpu in listed.split(",") if gpu.strip()]
    devices = Path("/dev").glob("nvidia[0-9]*")
    return sorted(device.name.removeprefix("nvidia") for device in devices)

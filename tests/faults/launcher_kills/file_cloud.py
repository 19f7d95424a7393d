"""A cloud in a folder: its machines outlive launchers, and follow its script.

`units/NAME.json` is a machine: `running` or `ended`. `script.json` is read at each question:
`sold_out` (starts to refuse), `start_s` (what a start takes), `setup_fails`, `unreachable`
(nothing is answered), `crashes` (the rollout's machines end at once), `sticky` (looks that still
find something).
"""

import asyncio
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from flotilla_launcher.backends.ports import (
    Backend,
    BackendUnreachable,
    CapacityError,
    CleanupEvidence,
    LaunchSpec,
    ResourceOffer,
    SetupError,
)
from flotilla_launcher.state import ROLLOUT, ExitStatus, Unit

_POLL_S = 0.03


class FileCloud(Backend):
    """A backend; also the tests' own view of what it holds."""

    def __init__(self, folder: Path) -> None:
        self._units = folder / "units"
        self._script = folder / "script.json"
        self._units.mkdir(parents=True, exist_ok=True)

    def script(self, **wishes: Any) -> None:
        draft = self._script.with_suffix(".new")
        draft.write_text(json.dumps({**self._wishes(), **wishes}))
        draft.replace(self._script)

    def running(self) -> list[str]:
        """The machines that cost something."""
        files = sorted(self._units.glob("*.json"))
        return [file.stem for file in files if _read(file)["state"] == "running"]

    def starts(self, label: str) -> int:
        """Return how often a machine for this replica was requested."""
        log = self._units / f"{label}.requests"
        return len(log.read_text()) if log.exists() else 0

    def finish(self, label: str, code: int = 0) -> None:
        """Let the machines of a replica end."""
        for file in self._units.glob(f"*{label}.json"):
            _write(file, {**_read(file), "state": "ended", "code": code})

    async def offer_resources(self, launch: LaunchSpec) -> ResourceOffer:
        self._wishes_of_one_that_answers()
        return ResourceOffer("a file", dollars_per_hour=3600.0)

    async def start_replica(self, launch: LaunchSpec) -> Unit:
        wishes = self._wishes_of_one_that_answers()
        label = f"{launch.key[0]}-{launch.key[1]}"
        with (self._units / f"{label}.requests").open("a") as log:
            log.write(".")
        if self.starts(label) <= wishes.get("sold_out", 0):
            raise CapacityError(f"no machine in attempt {launch.attempt}")
        unit = Unit(launch.name, 1, 1.0)
        file = self._file(unit)
        # The machine boots before the answer comes, as in clouds.
        if not file.exists() or _read(file)["state"] != "running":
            crashes = wishes.get("crashes") and launch.key[0] == ROLLOUT
            state = {"state": "ended", "code": 1} if crashes else {"state": "running", "code": 0}
            _write(file, state)
        await asyncio.sleep(wishes.get("start_s", 0.0))
        if wishes.get("setup_fails"):
            file.unlink()
            raise SetupError("setup exited with code 7")
        return unit

    async def attach_replica(self, launch: LaunchSpec, unit: Unit) -> bool:
        self._wishes_of_one_that_answers()
        return self._state(unit)["state"] == "running"

    async def wait_for_exit(self, unit: Unit) -> ExitStatus:
        while True:
            self._wishes_of_one_that_answers()
            found = self._state(unit)
            if found["state"] != "running":
                return ExitStatus(found["code"], "the last line")
            await asyncio.sleep(_POLL_S)

    async def drain_replica(self, unit: Unit) -> None:
        await self.kill_replica(unit)

    async def kill_replica(self, unit: Unit) -> None:
        self._wishes_of_one_that_answers()
        if self._file(unit).exists():
            _write(self._file(unit), {**self._state(unit), "state": "ended"})

    async def list_units(self, known: Collection[Unit] = ()) -> list[Unit]:
        self._wishes_of_one_that_answers()
        names = [name.replace("%", "/") for name in self.running()]
        return [Unit(name, 1, 1.0) for name in names]

    async def clean_run(self, run_id: str) -> CleanupEvidence:
        wishes = self._wishes_of_one_that_answers()
        if wishes.get("sticky", 0) > 0:
            self.script(sticky=wishes["sticky"] - 1)
            return CleanupEvidence(False, "a machine is still there")
        left = [name for name in self.running() if name.startswith(f"{run_id}%")]
        return CleanupEvidence(not left, ", ".join(left) or "the cloud shows nothing of the run")

    def _file(self, unit: Unit) -> Path:
        return self._units / f"{unit.name.replace('/', '%')}.json"

    def _state(self, unit: Unit) -> dict[str, Any]:
        file = self._file(unit)
        return _read(file) if file.exists() else {"state": "ended", "code": None}

    def _wishes(self) -> dict[str, Any]:
        return _read(self._script) if self._script.exists() else {}

    def _wishes_of_one_that_answers(self) -> dict[str, Any]:
        wishes = self._wishes()
        if wishes.get("unreachable"):
            raise BackendUnreachable("nobody answers")
        return wishes


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def _write(file: Path, content: dict[str, Any]) -> None:
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps(content))
    draft.replace(file)

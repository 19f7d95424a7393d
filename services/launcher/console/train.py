"""`flotilla train` and `flotilla eval`: from a spec to a run that has ended."""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common import rpc
from services.common.config import canonical_json, load_spec
from services.common.errors import ConfigError
from services.common.spec import parse_shared
from services.launcher.adopt import adopted
from services.launcher.console import prepare, report
from services.launcher.console import restore as restoring
from services.launcher.console.connection import LauncherError
from services.launcher.console.follow import Outcome, Wish, run_to_end
from services.launcher.console.interrupts import InterruptedByUserError, Interrupts
from services.launcher.console.views import RunConsole
from services.launcher.runs import RunMode, RunState
from services.launcher.store import Store, StoredRun

OK, FAILED, BAD_SPEC, INTERRUPTED = 0, 1, 2, 130


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for; `again` is the command that goes on with it."""

    spec: dict[str, Any]
    wish: Wish
    again: str


def train(
    path: Path, runs: Path, overrides: Sequence[str], *, resume: bool, run_id: str | None
) -> int:
    """Train from a spec, or go on with a run of it."""
    console = RunConsole()

    def request() -> Request:
        spec = load_spec(path, overrides)
        name = parse_shared(spec, where=str(path)).name
        again = f"flotilla train {path} --resume"
        if str(runs) != "runs":
            again = f"{again} --runs {runs}"
        if not resume:
            return Request(spec, Wish(canonical_json(spec), pb.RUN_MODE_TRAIN), again)
        chosen = run_id
        if chosen and restoring.is_url(chosen):
            chosen = restoring.restore(chosen, path, runs, overrides, console)
        stored = _stored(runs, chosen) if chosen else _newest(runs, name)
        if stored is None:
            raise ConfigError(f"there is no run {run_id or f'of spec {name!r}'} in {runs}")
        if stored.run.name != name:
            raise ConfigError(f"run {chosen} is of spec {stored.run.name!r}, not of {name!r}")
        spec = _changed(stored, overrides) if overrides else json.loads(stored.spec_json)
        text = canonical_json(spec) if overrides else ""
        return Request(spec, Wish(text, pb.RUN_MODE_TRAIN, stored.run.run_id), again)

    return _main(request, runs, console)


def evaluate(target: str, runs: Path, overrides: Sequence[str]) -> int:
    """Evaluate a run, or what a spec begins with."""
    console = RunConsole()

    def request() -> Request:
        again = f"flotilla eval {target}"
        stored = _stored(runs, target)
        spec: dict[str, Any] = {}
        if stored is None:
            spec = load_spec(Path(target), overrides)
            stored = _newest(runs, parse_shared(spec, where=target).name)
        if stored is None:
            return Request(spec, Wish(canonical_json(spec), pb.RUN_MODE_EVAL_ONLY), again)
        text = canonical_json(_changed(stored, overrides)) if overrides else ""
        spec = json.loads(text or stored.spec_json)
        return Request(spec, Wish(text, pb.RUN_MODE_EVAL_ONLY, stored.run.run_id), again)

    return _main(request, runs, console)


def _main(request: Any, runs: Path, console: Console) -> int:
    """Do it, and turn what goes wrong into a message and an exit code."""
    try:
        return _run(_carry_out(request(), runs, console))
    except ConfigError as error:
        return _fail(console, str(error), BAD_SPEC)
    except (LauncherError, prepare.PrepareError, restoring.RestoreFailedError) as error:
        return _fail(console, str(error), FAILED)
    except grpc.aio.AioRpcError as error:
        known = rpc.service_error(error)
        if known is None:
            return _fail(console, f"{error.code().name}: {error.details()}", FAILED)
        code = BAD_SPEC if known.reason == "BAD_SPEC" else FAILED
        return _fail(console, known.message, code)


def _run(work: Coroutine[Any, Any, int]) -> int:
    return asyncio.run(work)


def _fail(console: Console, message: str, code: int) -> int:
    console.print(f"error: {message}", markup=False, highlight=False, soft_wrap=True)
    return code


async def _carry_out(request: Request, runs: Path, console: Console) -> int:
    interrupts = Interrupts()
    with interrupts.caught():
        try:
            fresh = not request.wish.resume
            await prepare.run_all(request.spec, console, interrupts, refresh=fresh)
        except InterruptedByUserError:
            console.print("Interrupted before the run began; the same command starts over.")
            return INTERRUPTED
        outcome = await run_to_end(runs, request.wish, console, interrupts)
        return _conclude(outcome, request, runs, console)


def _conclude(outcome: Outcome, request: Request, runs: Path, console: Console) -> int:
    run = outcome.run
    if run is None:
        console.print("Interrupted before the run began; the same command starts over.")
        return INTERRUPTED
    run_dir = runs / run.run_id
    if run.cleanup == pb.CLEANUP_LEAK_SUSPECTED:
        left = f"something of run {run.run_id} may be left: flotilla status {run.run_id} says what"
        console.print(
            f"{left}; its launcher looks again every few minutes, for a day",
            style="red",
            highlight=False,
            soft_wrap=True,
        )
    if run.state == pb.RUN_STATE_COMPLETED:
        report.add_total_seconds(run_dir, outcome.seconds)
        evaluated = run.mode == pb.RUN_MODE_EVAL_ONLY
        report.print_report(run_dir, console, evaluated=evaluated)
        return OK
    report.draw_curve(run_dir)
    if run.state == pb.RUN_STATE_FAILED:
        _fail(console, f"run {run.run_id} failed: {run.error}", FAILED)
    elif run.cleanup == pb.CLEANUP_LEAK_SUSPECTED:
        console.print(f"Run {run.run_id} was stopped.", highlight=False)
    else:
        console.print(f"Run {run.run_id} was stopped; nothing of it is running.", highlight=False)
    console.print(f"To go on:\n  {request.again}", markup=False, highlight=False, soft_wrap=True)
    return INTERRUPTED if outcome.interrupted else FAILED


def _ledger(runs: Path) -> list[StoredRun]:
    path = runs / "launcher.sqlite"
    if not path.exists():
        return []
    store = Store(path)
    found = store.newest()
    store.close()
    return found


def _stored(runs: Path, run_id: str) -> StoredRun | None:
    known = next((s for s in _ledger(runs) if s.run.run_id == run_id), None)
    return known or adopted(runs, run_id)


def _newest(runs: Path, name: str) -> StoredRun | None:
    """The newest run of a spec that is not complete, or the newest at all."""
    found = [stored for stored in _ledger(runs) if stored.run.name == name]
    complete = (RunState.COMPLETED, RunMode.TRAIN)
    unfinished = [s for s in found if (s.run.state, s.run.mode) != complete]
    return next(iter(unfinished or found), None)


def _changed(stored: StoredRun, overrides: Sequence[str]) -> dict[str, Any]:
    """A run's own spec with overrides."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(stored.spec_json)
        return load_spec(path, overrides)

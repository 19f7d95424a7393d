"""`flotilla train` and `flotilla eval`: from a spec to a run that has ended."""

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common import rpc
from services.common.config import canonical_json, load_spec
from services.common.errors import ConfigError
from services.common.spec import parse_shared
from services.launcher.cli import command_hints, prepare, train_report
from services.launcher.cli import restore as restoring
from services.launcher.cli.follow_run import FollowOutcome, RunRequest, run_to_end
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.launcher_client import LauncherError
from services.launcher.cli.progress_view import RunConsole
from services.launcher.cli.run_view import ENDED
from services.launcher.cli.terminal import Terminal
from services.launcher.cli.watch import print_detach_hints
from services.launcher.control.recover_from_folder import recover_stored_run
from services.launcher.control.spec_changes import diff_specs
from services.launcher.state import RunMode, RunState
from services.launcher.store.ledger import Ledger, StoredRun
from services.launcher.store.run_files import JOURNAL, SPEC_FILE

OK, FAILED, BAD_SPEC, INTERRUPTED = 0, 1, 2, 130
NEWEST = "newest"


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The user's request. `again` is the command that continues it, `anew` the one that begins
    another run."""

    spec: dict[str, Any]
    run_request: RunRequest
    again: str
    anew: str


def train_policy(
    path: Path,
    runs: Path,
    overrides: Sequence[str],
    *,
    resume: bool,
    run_id: str | None,
    update: bool = False,
    accept_loss: bool = False,
    detach: bool = False,
) -> int:
    """Train from a spec, or resume a run of it; `update` applies today's spec to that run. With
    `detach`, do not wait for its end."""
    console = RunConsole()

    def make_request() -> TrainRequest:
        spec = load_spec(path, overrides)
        anew = command_hints.format_command("train", str(path), *overrides, runs=runs)
        again = command_hints.format_command("train", str(path), "--resume", *overrides, runs=runs)
        if not resume:
            return TrainRequest(
                spec, RunRequest(canonical_json(spec), pb.RUN_MODE_TRAIN), again, anew
            )
        chosen = run_id
        if chosen and restoring.is_url(chosen):
            chosen = restoring.restore_run(chosen, path, runs, overrides, console)
        stored = _find_run_to_resume(runs, chosen, parse_shared(spec, where=str(path)).name)
        if not update:
            _check_same_spec(stored, spec, path, overrides, runs)
        if accept_loss:
            restoring.accept_loss(runs / stored.run.run_id, console)
        text = canonical_json(spec) if update or overrides else ""
        return TrainRequest(
            spec, RunRequest(text, pb.RUN_MODE_TRAIN, stored.run.run_id), again, anew
        )

    return _run_command(make_request, runs, console, detach=detach)


def evaluate_policy(target: str, runs: Path, overrides: Sequence[str]) -> int:
    """Evaluate a run, or the initial policy of a spec."""
    console = RunConsole()

    def make_request() -> TrainRequest:
        again = command_hints.format_command("eval", target, *overrides, runs=runs)
        stored = _find_stored_run(runs, target)
        if stored is None and target == NEWEST:
            raise ConfigError(f"there are no runs in {runs}; `flotilla train SPEC` makes one")
        if stored is None:
            spec = load_spec(Path(target), overrides)
            stored = _find_newest_run(runs, parse_shared(spec, where=target).name)
            if stored is None:
                run_request = RunRequest(canonical_json(spec), pb.RUN_MODE_EVAL_ONLY)
                return TrainRequest(spec, run_request, again, again)
            _print_spec_changes(stored, spec, overrides, console)
        text = canonical_json(_apply_overrides(stored, overrides)) if overrides else ""
        spec = json.loads(text or stored.spec_json)
        run_request = RunRequest(text, pb.RUN_MODE_EVAL_ONLY, stored.run.run_id)
        return TrainRequest(spec, run_request, again, again)

    return _run_command(make_request, runs, console)


def _find_run_to_resume(runs: Path, run_id: str | None, name: str) -> StoredRun:
    """Return the run of this spec to resume: by its id, the `newest`, or the newest that is not
    complete. Raises ConfigError."""
    if run_id and run_id != NEWEST:
        stored = _find_stored_run(runs, run_id)
    else:
        stored = _find_newest_run(runs, name, finished=run_id == NEWEST)
        run_id = None
    if stored is None:
        raise ConfigError(f"there is no run {run_id or f'of spec {name!r}'} in {runs}")
    if stored.run.name != name:
        raise ConfigError(f"run {run_id} is of spec {stored.run.name!r}, not of {name!r}")
    return stored


def _check_same_spec(
    stored: StoredRun, spec: dict[str, Any], path: Path, overrides: Sequence[str], runs: Path
) -> None:
    """Check that the file and the run's own spec agree; neither is preferred silently. Raises
    ConfigError."""
    found = diff_specs(_apply_overrides(stored, overrides), spec)
    if not found:
        return
    run_id = stored.run.run_id
    own = str(runs / run_id / SPEC_FILE)
    update = command_hints.format_command(
        "train", str(path), "--resume", run_id, "--update", *overrides, runs=runs
    )
    keep = command_hints.format_command("train", own, "--resume", run_id, *overrides, runs=runs)
    anew = command_hints.format_command("train", str(path), *overrides, runs=runs)
    fixed = any(change.fixed_reason for change in found)
    take = f"To begin a new run:\n  {anew}" if fixed else f"To take what the file says:\n  {update}"
    told = "\n".join(f"  {change.format_change()}" for change in found)
    raise ConfigError(
        f"{path} is not what run {run_id} has:\n{told}\n{take}\nTo keep what the run has:\n  {keep}"
    )


def _print_spec_changes(
    stored: StoredRun, spec: dict[str, Any], overrides: Sequence[str], console: Terminal
) -> None:
    """Print how the file differs from the run's spec: an evaluation uses the run's, whatever
    the file says now."""
    found = diff_specs(_apply_overrides(stored, overrides), spec)
    if found:
        told = "\n".join(f"  {change.format_change()}" for change in found)
        text = f"Run {stored.run.run_id} is evaluated as it was trained, not as the file is now:"
        console.print(f"{text}\n{told}", soft_wrap=True)


def _run_command(request: Any, runs: Path, console: Terminal, *, detach: bool = False) -> int:
    """Carry out the request, and turn errors into a message and an exit code."""
    try:
        asked = request()
        asked = replace(asked, run_request=replace(asked.run_request, detach=detach))
        return _run_async(_run_request(asked, runs, console))
    except ConfigError as error:
        return _report_error(console, str(error), BAD_SPEC)
    except (LauncherError, prepare.PrepareError, restoring.RestoreFailedError) as error:
        return _report_error(console, str(error), FAILED)
    except grpc.aio.AioRpcError as error:
        known = rpc.service_error(error)
        if known is None:
            return _report_error(console, f"{error.code().name}: {error.details()}", FAILED)
        code = BAD_SPEC if known.reason == "BAD_SPEC" else FAILED
        return _report_error(console, known.message, code)


def _run_async(work: Coroutine[Any, Any, int]) -> int:
    return asyncio.run(work)


def _report_error(console: Terminal, message: str, code: int) -> int:
    console.print(f"error: {message}", soft_wrap=True)
    return code


async def _run_request(request: TrainRequest, runs: Path, console: Terminal) -> int:
    interrupts = Interrupts()
    with interrupts.catch_signals():
        try:
            fresh = not request.run_request.resume
            await prepare.run_prepare_commands(request.spec, console, interrupts, refresh=fresh)
        except InterruptedByUserError:
            console.print("Interrupted before the run began; the same command starts over.")
            return INTERRUPTED
        outcome = await run_to_end(runs, request.run_request, console, interrupts)
        return _print_conclusion(outcome, request, runs, console)


def _print_conclusion(
    outcome: FollowOutcome, request: TrainRequest, runs: Path, console: Terminal
) -> int:
    run = outcome.run
    if run is None:
        console.print("Interrupted before the run began; the same command starts over.")
        return INTERRUPTED
    if request.run_request.detach and run.state not in ENDED:
        print_detach_hints(
            console, run.run_id, runs, command_hints.format_command("stop", run.run_id, runs=runs)
        )
        return OK
    run_dir = runs / run.run_id
    if run.cleanup == pb.CLEANUP_LEAK_SUSPECTED:
        look = command_hints.format_command("status", run.run_id, runs=runs)
        left = f"something of run {run.run_id} may be left: {look} says what"
        console.print(
            f"{left}; its launcher looks again every few minutes, for a day",
            style="red",
            highlight=False,
            soft_wrap=True,
        )
    if run.state == pb.RUN_STATE_COMPLETED:
        train_report.add_total_seconds(run_dir, outcome.seconds)
        evaluated = run.mode == pb.RUN_MODE_EVAL_ONLY
        train_report.print_report(run_dir, console, evaluated=evaluated)
        return OK
    train_report.draw_curve(run_dir)
    if run.state == pb.RUN_STATE_FAILED:
        _report_error(console, f"run {run.run_id} failed: {run.error}", FAILED)
    elif run.cleanup == pb.CLEANUP_LEAK_SUSPECTED:
        console.print(f"Run {run.run_id} was stopped.")
    else:
        console.print(f"Run {run.run_id} was stopped; nothing of it is running.")
    console.print(_format_next_steps(run, request, runs), soft_wrap=True)
    return INTERRUPTED if outcome.interrupted else FAILED


def _format_next_steps(run: pb.Run, request: TrainRequest, runs: Path) -> str:
    """Say what the user can do about a run that ended early. Resuming does not cure a refusal."""
    if run.outcome != pb.OUTCOME_REFUSED:
        return f"To go on:\n  {request.again}"
    if not (runs / run.run_id / JOURNAL).exists():
        return f"Nothing was trained. To begin anew, once that is mended:\n  {request.anew}"
    return (
        "What was trained is kept. The run goes on once that is mended; what is mended in the spec"
        " is taken with --update."
    )


def _read_ledger(runs: Path) -> list[StoredRun]:
    path = runs / "launcher.sqlite"
    if not path.exists():
        return []
    store = Ledger(path)
    found = store.list_newest()
    store.close()
    return found


def _find_stored_run(runs: Path, run_id: str) -> StoredRun | None:
    known = next(
        (s for s in _read_ledger(runs) if s.run.run_id == run_id or run_id == NEWEST), None
    )
    return known or recover_stored_run(runs, run_id)


def _find_newest_run(runs: Path, name: str, *, finished: bool = False) -> StoredRun | None:
    """Return the newest run of a spec that is not complete, or else the newest; with `finished`
    the newest in any case."""
    found = [stored for stored in _read_ledger(runs) if stored.run.name == name]
    complete = (RunState.COMPLETED, RunMode.TRAIN)
    unfinished = [s for s in found if finished or (s.run.state, s.run.mode) != complete]
    return next(iter(unfinished or found), None)


def _apply_overrides(stored: StoredRun, overrides: Sequence[str]) -> dict[str, Any]:
    """Return a run's own spec with overrides applied."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(stored.spec_json)
        return load_spec(path, overrides)

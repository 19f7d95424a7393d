"""`flotilla train` and `flotilla eval`: from a spec to a run that has ended."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common.rpc.errors import ConfigError
from services.common.spec.config import canonical_json, load_spec
from services.common.spec.spec import parse_shared
from services.launcher.cli import command_hints, prepare, train_report
from services.launcher.cli import restore as restoring
from services.launcher.cli.command_runner import (
    BAD_SPEC,
    FAILED,
    INTERRUPTED,
    OK,
    reports_errors,
    run_interruptible,
)
from services.launcher.cli.follow_run import FollowOutcome, run_to_end
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.progress_view import RunConsole
from services.launcher.cli.run_source import (
    NEWEST,
    NoRunError,
    find_local_run,
    list_local_runs,
)
from services.launcher.cli.run_view import ENDED
from services.launcher.cli.spec_start import check_before_start
from services.launcher.cli.terminal import CommandError, Terminal
from services.launcher.cli.watch import print_detach_hints
from services.launcher.control.prepare_commands import PrepareError
from services.launcher.control.recover_from_folder import recover_stored_run
from services.launcher.control.spec_changes import diff_specs
from services.launcher.state import RunMode, RunState
from services.launcher.store.ledger import StoredRun
from services.launcher.store.run_files import JOURNAL, SPEC_FILE


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The user's request. `resume_command` continues its run, `new_command` begins another."""

    spec: dict[str, Any]
    # What names the spec in an error.
    where: str
    start: pb.StartRunRequest
    resume_command: str
    new_command: str


@reports_errors(bad_spec=BAD_SPEC)
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
    wait: bool = False,
    priority: int = 0,
) -> int:
    """Train from a spec, or resume a run of it; `update` applies today's spec to that run. With
    `detach`, do not wait for its end."""
    console, words = RunConsole(), ("train", str(path))
    spec = load_spec(path, overrides)
    resume_command = command_hints.format_command(*words, "--resume", *overrides, runs=runs)
    new_command = command_hints.format_command(*words, *overrides, runs=runs)
    start = pb.StartRunRequest(mode=pb.RUN_MODE_TRAIN, wait=wait, priority=priority)
    if resume:
        if run_id and "://" in run_id:
            run_id = restoring.restore_run(run_id, path, runs, overrides, console)
        stored = _find_run_to_resume(runs, run_id, parse_shared(spec, where=str(path)).name)
        if not update:
            _check_same_spec(stored, spec, path, overrides, runs)
        if accept_loss:
            restoring.accept_loss(runs / stored.run.run_id, console)
        start.resume_run_id = stored.run.run_id
    if update or overrides or not resume:
        start.spec_json = canonical_json(spec)
    request = TrainRequest(spec, str(path), start, resume_command, new_command)
    return run_interruptible(
        lambda interrupts: _run_request(request, runs, console, interrupts, detach=detach)
    )


@reports_errors(bad_spec=BAD_SPEC)
def evaluate_policy(
    target: str,
    runs: Path,
    overrides: Sequence[str],
    *,
    wait: bool = False,
    priority: int = 0,
) -> int:
    """Evaluate a run, or the initial policy of a spec."""
    console = RunConsole()
    start = pb.StartRunRequest(mode=pb.RUN_MODE_EVAL_ONLY, wait=wait, priority=priority)
    stored = _find_stored_run(runs, target)
    spec: dict[str, Any] = {}
    if stored is None and target == NEWEST:
        raise ConfigError(f"there are no runs in {runs}; `flotilla train SPEC` makes one")
    if stored is None:
        spec = load_spec(Path(target), overrides)
        stored = _find_newest_run(runs, parse_shared(spec, where=target).name)
        if stored is None:
            start.spec_json = canonical_json(spec)
        else:
            _print_spec_changes(stored, spec, overrides, console)
    if stored is not None:
        spec = json.loads(stored.spec_json)
        start.resume_run_id = stored.run.run_id
        if overrides:
            spec = _apply_overrides(stored, overrides)
            start.spec_json = canonical_json(spec)
    again = command_hints.format_command("eval", target, *overrides, runs=runs)
    request = TrainRequest(spec, target, start, again, again)
    return run_interruptible(lambda interrupts: _run_request(request, runs, console, interrupts))


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
    new = command_hints.format_command("train", str(path), *overrides, runs=runs)
    fixed = any(change.fixed_reason for change in found)
    take = f"To begin a new run:\n  {new}" if fixed else f"To take the file's values:\n  {update}"
    differences = "\n".join(f"  {change.format_change()}" for change in found)
    raise ConfigError(
        f"{path} differs from the spec of run {run_id}:\n{differences}\n{take}\n"
        f"To keep the run's values:\n  {keep}"
    )


def _print_spec_changes(
    stored: StoredRun, spec: dict[str, Any], overrides: Sequence[str], console: Terminal
) -> None:
    found = diff_specs(_apply_overrides(stored, overrides), spec)
    if found:
        differences = "\n".join(f"  {change.format_change()}" for change in found)
        text = f"Run {stored.run.run_id} is evaluated as it was trained; the file differs:"
        console.print(f"{text}\n{differences}", soft_wrap=True)


async def _run_request(
    request: TrainRequest,
    runs: Path,
    console: Terminal,
    interrupts: Interrupts,
    *,
    detach: bool = False,
) -> int:
    fresh = not request.start.resume_run_id
    await interrupts.unless_interrupted(check_before_start(request.spec, request.where, runs))
    try:
        await prepare.run_prepare_commands(request.spec, console, interrupts, refresh=fresh)
        outcome = await run_to_end(runs, request.start, console, interrupts, detach=detach)
    except PrepareError as error:
        raise CommandError(str(error)) from error
    except InterruptedByUserError:
        outcome = FollowOutcome(None, interrupted=True, seconds=0.0)
    if outcome.run is None and not outcome.interrupted:
        console.print("The run was withdrawn from the queue; nothing of it is left.")
        return FAILED
    if outcome.run is None:
        console.print("Interrupted before the run began; the same command starts over.")
        return INTERRUPTED
    if detach and outcome.run.state not in ENDED:
        stop = command_hints.format_command("stop", outcome.run.run_id, runs=runs)
        print_detach_hints(console, outcome.run.run_id, runs, stop)
        return OK
    return _print_conclusion(outcome.run, outcome, request, runs, console)


def _print_conclusion(
    run: pb.Run, outcome: FollowOutcome, request: TrainRequest, runs: Path, console: Terminal
) -> int:
    run_dir, leaking = runs / run.run_id, run.cleanup == pb.CLEANUP_LEAK_SUSPECTED
    if leaking:
        look = command_hints.format_command("status", run.run_id, runs=runs)
        console.print(
            f"run {run.run_id} may have left resources behind: {look} lists them; its launcher"
            " checks again every few minutes, for a day",
            style="red",
            soft_wrap=True,
        )
    if run.state == pb.RUN_STATE_COMPLETED:
        train_report.add_total_seconds(run_dir, outcome.seconds)
        evaluated = run.mode == pb.RUN_MODE_EVAL_ONLY
        train_report.print_report(run_dir, console, evaluated=evaluated)
        return OK
    train_report.draw_curve(run_dir)
    if run.state == pb.RUN_STATE_FAILED:
        console.print(f"error: run {run.run_id} failed: {run.error}", soft_wrap=True)
    else:
        rest = "." if leaking else "; nothing of it is running."
        console.print(f"Run {run.run_id} was stopped{rest}")
    console.print(_format_next_steps(run, request, runs), soft_wrap=True)
    return INTERRUPTED if outcome.interrupted else FAILED


def _format_next_steps(run: pb.Run, request: TrainRequest, runs: Path) -> str:
    """Format what the user can do about a run that ended early. Resuming does not cure a
    refusal."""
    if run.outcome != pb.OUTCOME_REFUSED:
        return f"To resume:\n  {request.resume_command}"
    if not (runs / run.run_id / JOURNAL).exists():
        return f"Nothing was trained. To begin again, once that is fixed:\n  {request.new_command}"
    return (
        "All training is kept. The run can be resumed once that is fixed; for changes of the spec,"
        " pass --update."
    )


def _find_stored_run(runs: Path, run_id: str) -> StoredRun | None:
    try:
        return find_local_run(run_id, runs)
    except NoRunError:
        return recover_stored_run(runs, run_id)


def _find_newest_run(runs: Path, name: str, *, finished: bool = False) -> StoredRun | None:
    """Return the newest run of a spec that is not complete, or else the newest; with `finished`
    the newest in any case."""
    found = list_local_runs(runs, name)
    complete = (RunState.COMPLETED, RunMode.TRAIN)
    unfinished = [s for s in found if finished or (s.run.state, s.run.mode) != complete]
    return next(iter(unfinished or found), None)


def _apply_overrides(stored: StoredRun, overrides: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(stored.spec_json)
        return load_spec(path, overrides)

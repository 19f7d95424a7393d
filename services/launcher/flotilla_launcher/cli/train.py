"""`flotilla train`, `submit` and `eval`: from a spec to a run that has ended.

With a launcher elsewhere `train` is `submit`: Ctrl-C leaves the run running, and its result comes
from the launcher, since the run's files are not here."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla.launcher.v1 import run_service_pb2 as pb
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import canonical_json
from flotilla_common.spec.spec import parse_shared
from flotilla_common.spec.spec_loading import load_spec
from flotilla_launcher.api import codec
from flotilla_launcher.cli import command_hints, prepare, train_report
from flotilla_launcher.cli import restore as restoring
from flotilla_launcher.cli.command_runner import (
    BAD_SPEC,
    FAILED,
    INTERRUPTED,
    OK,
    print_text,
    reports_errors,
    run_interruptible,
)
from flotilla_launcher.cli.follow_run import FollowOutcome, run_to_end
from flotilla_launcher.cli.interrupts import InterruptedByUserError, Interrupts
from flotilla_launcher.cli.progress_view import RunConsole
from flotilla_launcher.cli.run_source import (
    NEWEST,
    NoRunError,
    RunSource,
    find_run,
    open_run_source,
)
from flotilla_launcher.cli.run_view import ENDED, STATE_NAMES, format_cleanup, format_outcome
from flotilla_launcher.cli.spec_start import check_before_start
from flotilla_launcher.cli.terminal import CommandError, Terminal
from flotilla_launcher.cli.watch import print_detach_hints
from flotilla_launcher.control.prepare_commands import PrepareError
from flotilla_launcher.control.spec_changes import diff_specs
from flotilla_launcher.security.launcher_address import address_from_environment
from flotilla_launcher.store.run_files import JOURNAL, SPEC_FILE, recover_stored_run


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """Options of `train` and `submit`. The same `request_id` names the same run, however often it
    is submitted; with it the command only follows the run. `summary` is a Markdown file to which
    the result is appended."""

    resume: bool = False
    run_id: str = ""
    update: bool = False
    accept_loss: bool = False
    detach: bool = False
    wait: bool = False
    priority: int = 0
    request_id: str = ""
    summary: Path | None = None
    # The words after `flotilla` that train the same spec; by default `train` and its file.
    again: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """The user's request. `resume_command` continues its run, `new_command` begins another.

    If the command `leaves`, Ctrl-C does not stop the run."""

    spec: dict[str, Any]
    # What names the spec in an error.
    where: str
    start: pb.StartRunRequest
    resume_command: str
    new_command: str
    leaves: bool = False
    detach: bool = False
    summary: Path | None = None


@reports_errors(bad_spec=BAD_SPEC)
def train_policy(path: Path, runs: Path, overrides: Sequence[str], options: TrainOptions) -> int:
    """Train from a spec, or resume a run of it; `update` applies today's spec to that run. With
    `detach`, do not wait for its end."""

    async def train(interrupts: Interrupts) -> int:
        console, words = RunConsole(), options.again or ("train", str(path))
        spec = load_spec(path, overrides)
        elsewhere = address_from_environment() is not None
        leaves = elsewhere or bool(options.request_id)
        start = pb.StartRunRequest(
            request_id=options.request_id,
            mode=pb.RUN_MODE_TRAIN,
            wait=options.wait or leaves,
            priority=options.priority,
        )
        if options.resume:
            start.resume_run_id = await _choose_run_to_resume(
                spec, path, runs, overrides, options, interrupts
            )
        if options.update or overrides or not options.resume:
            start.spec_json = canonical_json(spec)
        request = TrainRequest(
            spec,
            str(path),
            start,
            command_hints.format_command(*words, "--resume", *overrides, runs=runs),
            command_hints.format_command(*words, *overrides, runs=runs),
            leaves,
            options.detach,
            options.summary,
        )
        return await _run_request(request, runs, console, interrupts)

    return run_interruptible(train)


@reports_errors(bad_spec=BAD_SPEC)
def evaluate_policy(
    target: str, runs: Path, overrides: Sequence[str], *, wait: bool = False, priority: int = 0
) -> int:
    """Evaluate a run, or the initial policy of a spec."""

    async def evaluate(interrupts: Interrupts) -> int:
        console, leaves = RunConsole(), address_from_environment() is not None
        start = pb.StartRunRequest(
            mode=pb.RUN_MODE_EVAL_ONLY, wait=wait or leaves, priority=priority
        )
        spec: dict[str, Any] = {}
        async with open_run_source(runs, interrupts) as known:
            stored = await interrupts.unless_interrupted(_find_known(known, runs, target))
            if stored is None and target == NEWEST:
                raise ConfigError(f"there are no runs in {runs}; `flotilla train SPEC` makes one")
            if stored is None:
                spec = load_spec(Path(target), overrides)
                name = parse_shared(spec, where=target).name
                stored = await interrupts.unless_interrupted(_find_newest(known, name))
                if stored is None:
                    start.spec_json = canonical_json(spec)
                else:
                    _print_spec_changes(stored, spec, overrides, console)
        if stored is not None:
            spec = _apply_overrides(stored, overrides)
            start.resume_run_id = stored.run_id
            if overrides:
                start.spec_json = canonical_json(spec)
        again = command_hints.format_command("eval", target, *overrides, runs=runs)
        request = TrainRequest(spec, target, start, again, again, leaves)
        return await _run_request(request, runs, console, interrupts)

    return run_interruptible(evaluate)


async def _choose_run_to_resume(
    spec: dict[str, Any],
    path: Path,
    runs: Path,
    overrides: Sequence[str],
    options: TrainOptions,
    interrupts: Interrupts,
) -> str:
    """Return the id of the run to resume: restored from its upload if a URL names it. Raises
    ConfigError."""
    run_id, console = options.run_id, RunConsole()
    if options.request_id and run_id != NEWEST:
        # The launcher compares the specs, each time that the request is submitted.
        return run_id
    if address_from_environment() is not None and (options.accept_loss or "://" in run_id):
        raise ConfigError(
            "restoring a run, and accepting the loss of its data, change its files: use the machine"
            " of the launcher that FLOTILLA_LAUNCHER names, in its folder"
        )
    if "://" in run_id:
        restoration = restoring.restore_run(run_id, path, runs, overrides, console)
        run_id = await interrupts.unless_interrupted(restoration)
    name = parse_shared(spec, where=str(path)).name
    async with open_run_source(runs, interrupts) as known:
        finding = _find_run_to_resume(known, runs, run_id, name)
        stored = await interrupts.unless_interrupted(finding)
    if options.request_id:
        raise ConfigError(
            "--resume newest: a repeated request names the same run, and the newest may be another"
            f" one by then; write --resume {stored.run_id}, which is the newest of spec {name!r}"
            " now"
        )
    if not options.update:
        _check_same_spec(stored, spec, path, overrides, runs)
    if options.accept_loss:
        acceptance = restoring.accept_loss(runs / stored.run_id, console)
        await interrupts.unless_interrupted(acceptance)
    return stored.run_id


async def _find_run_to_resume(known: RunSource, runs: Path, run_id: str, name: str) -> pb.Run:
    """Return the run of this spec to resume: by its id, the `newest`, or the newest that is not
    complete. Raises ConfigError."""
    if run_id and run_id != NEWEST:
        stored = await _find_known(known, runs, run_id)
    else:
        stored = await _find_newest(known, name, finished=run_id == NEWEST)
        run_id = ""
    if stored is None:
        raise ConfigError(f"there is no run {run_id or f'of spec {name!r}'} in {runs}")
    if stored.name != name:
        raise ConfigError(f"run {run_id} is of spec {stored.name!r}, not of {name!r}")
    return stored


def _check_same_spec(
    stored: pb.Run, spec: dict[str, Any], path: Path, overrides: Sequence[str], runs: Path
) -> None:
    """Check that the file and the run's own spec agree; neither is preferred silently. Raises
    ConfigError."""
    found = diff_specs(_apply_overrides(stored, overrides), spec)
    if not found:
        return
    run_id = stored.run_id
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
    stored: pb.Run, spec: dict[str, Any], overrides: Sequence[str], console: Terminal
) -> None:
    found = diff_specs(_apply_overrides(stored, overrides), spec)
    if found:
        differences = "\n".join(f"  {change.format_change()}" for change in found)
        text = f"Run {stored.run_id} is evaluated as it was trained; the file differs:"
        console.print(f"{text}\n{differences}", soft_wrap=True)


async def _run_request(
    request: TrainRequest, runs: Path, console: Terminal, interrupts: Interrupts
) -> int:
    fresh = not request.start.resume_run_id
    await interrupts.unless_interrupted(check_before_start(request.spec, request.where, runs))
    try:
        if not request.leaves:
            await prepare.run_prepare_commands(request.spec, console, interrupts, refresh=fresh)
        outcome = await run_to_end(
            runs,
            request.start,
            console,
            interrupts,
            detach=request.detach,
            leaves=request.leaves,
        )
    except PrepareError as error:
        raise CommandError(str(error)) from error
    except InterruptedByUserError:
        outcome = FollowOutcome(None, interrupted=True, seconds=0.0)
    run = outcome.run
    if run is None and not outcome.interrupted:
        console.print("The run was withdrawn from the queue; nothing of it is left.")
        return FAILED
    if run is None:
        if not request.leaves:
            console.print("Interrupted before the run began; the same command starts over.")
        return INTERRUPTED
    if (request.detach or request.leaves) and run.state not in ENDED:
        words = ("cancel", request.start.request_id) if request.leaves else ("stop", run.run_id)
        print_detach_hints(
            console, run.run_id, runs, command_hints.format_command(*words, runs=runs)
        )
        return OK if request.detach else INTERRUPTED
    if request.leaves:
        return _print_summary(run, request.summary)
    return _print_conclusion(run, outcome, request, runs, console)


def _print_summary(run: pb.Run, summary: Path | None) -> int:
    """Print the result of a run whose files may be elsewhere."""
    rows = [
        ("Run", run.run_id),
        ("State", STATE_NAMES[run.state]),
        ("Outcome", format_outcome(run)),
        ("Machines", format_cleanup(run)),
        ("Spent", f"${run.cost.accrued:,.2f}"),
        ("Restarts", str(sum(replica.restarts for replica in run.replicas))),
    ]
    if "eval/all/pass_at_1" in run.metrics:
        rows.append(("Held-out pass@1", f"{run.metrics['eval/all/pass_at_1']:.1%}"))
    for label, value in rows:
        print_text(f"{label}: {value}")
    if summary is not None:
        lines = ["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)]
        with summary.open("a", encoding="utf-8") as file:
            file.write("\n".join([*lines, ""]) + "\n")
    if run.error:
        print_text(run.error)
    return OK if run.state == pb.RUN_STATE_COMPLETED else FAILED


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


async def _find_known(known: RunSource, runs: Path, run_id: str) -> pb.Run | None:
    """Return a run by its id, or the `newest`; also one that has only its folder here."""
    try:
        return await find_run(known, run_id)
    except NoRunError:
        stored = None
        if address_from_environment() is None:
            stored = recover_stored_run(runs, run_id)
        return codec.run_to_pb(stored, runs) if stored else None


async def _find_newest(known: RunSource, name: str, *, finished: bool = False) -> pb.Run | None:
    """Return the newest run of a spec that is not complete, or else the newest; with `finished`
    the newest in any case."""
    try:
        found = (await known.list_runs(pb.ListRunsRequest(name=name))).runs
    except NoRunError:
        return None
    complete = (pb.RUN_STATE_COMPLETED, pb.RUN_MODE_TRAIN)
    unfinished = [run for run in found if finished or (run.state, run.mode) != complete]
    chosen = next(iter(unfinished or found), None)
    return None if chosen is None else await known.get_run(chosen.run_id)


def _apply_overrides(stored: pb.Run, overrides: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(stored.spec_json)
        return load_spec(path, overrides)

"""`flotilla submit`: starts a run at a remote launcher, for machines that are not part of it, such
as those of continuous integration."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flotilla.launcher.v1 import run_service_pb2 as pb
from services.common.rpc.errors import ConfigError
from services.common.spec.config import canonical_json, load_spec
from services.common.spec.spec import parse_shared
from services.launcher.cli.command_runner import FAILED, INTERRUPTED, OK, print_text, with_launcher
from services.launcher.cli.follow_run import FollowedRun, watch_until_left
from services.launcher.cli.interrupts import InterruptedByUserError, Interrupts
from services.launcher.cli.launcher_client import LauncherConnection, start_run
from services.launcher.cli.progress_view import PlainView, RunConsole
from services.launcher.cli.run_source import NEWEST
from services.launcher.cli.run_view import STATE_NAMES, format_cleanup, format_outcome
from services.launcher.cli.spec_start import check_before_start
from services.launcher.cli.watch import print_detach_hints

_CALL_S = 30.0


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A run to submit. The same `request_id` names the same run, however often it is submitted.
    With `detach` the run is not followed."""

    spec: Path
    overrides: Sequence[str]
    request_id: str
    resume: str = ""
    summary: Path | None = None
    detach: bool = False
    priority: int = 0


def submit_run(submission: SubmitRequest, runs: Path) -> int:
    """Start a run and follow it to its end. Ctrl-C only stops following it."""

    async def start_and_follow(connection: LauncherConnection, interrupts: Interrupts) -> int:
        spec = load_spec(submission.spec, submission.overrides)
        if submission.resume == NEWEST:
            name = parse_shared(spec, where=str(submission.spec)).name
            explanation = _explain_newest_refusal(connection, name)
            raise ConfigError(await interrupts.unless_interrupted(explanation))
        await interrupts.unless_interrupted(check_before_start(spec, str(submission.spec), runs))
        request = pb.StartRunRequest(
            request_id=submission.request_id,
            spec_json=canonical_json(spec),
            mode=pb.RUN_MODE_TRAIN,
            resume_run_id=submission.resume,
            wait=True,
            priority=submission.priority,
        )
        cancel = connection.cancel_command(submission.request_id)
        try:
            run_id = await interrupts.unless_interrupted(start_run(connection, request))
        except InterruptedByUserError:
            print_text(f"interrupted, and the run may have begun: {cancel} makes sure it ends")
            return INTERRUPTED
        print_text(f"Run {run_id}")
        console, followed = RunConsole(), FollowedRun(0, run_id)
        if submission.detach or not await watch_until_left(
            connection, followed, PlainView(console), interrupts
        ):
            print_detach_hints(console, run_id, runs, cancel)
            return OK if submission.detach else INTERRUPTED
        return _print_conclusion(await connection.get_run(run_id, _CALL_S), submission.summary)

    return with_launcher(runs, start_and_follow)


async def _explain_newest_refusal(connection: LauncherConnection, name: str) -> str:
    listed = await connection.await_answer(
        connection.stub.ListRuns(pb.ListRunsRequest(name=name, page_size=1), timeout=_CALL_S)
    )
    newest = next((run.run_id for run in listed.runs), "")
    if not newest:
        return f"--resume newest: there is no run of spec {name!r} at this launcher"
    return (
        "--resume newest: a repeated request names the same run, and the newest may be another one"
        f" by then; write --resume {newest}, which is the newest of spec {name!r} now"
    )


def _print_conclusion(run: pb.Run, summary: Path | None) -> int:
    rows = _summary_rows(run)
    for label, value in rows:
        print_text(f"{label}: {value}")
    if summary is not None:
        lines = ["| | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)]
        with summary.open("a", encoding="utf-8") as file:
            file.write("\n".join([*lines, ""]) + "\n")
    if run.error:
        print_text(run.error)
    return OK if run.state == pb.RUN_STATE_COMPLETED else FAILED


def _summary_rows(run: pb.Run) -> list[tuple[str, str]]:
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
    return rows

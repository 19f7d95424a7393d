"""Commands for a launcher elsewhere: `flotilla submit`, `watch`, `cancel`, `reap` and `join`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from services.launcher.cli.options import GRACE_S, OVERRIDES, RUNS, Detach, Grace, Runs


def add_remote_commands(app: typer.Typer) -> None:
    app.command(context_settings=OVERRIDES)(submit)
    app.command()(watch)
    app.command()(cancel)
    app.command()(reap)
    app.command()(join)


def submit(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec, TOML or JSON.", exists=True)],
    request_id: Annotated[
        str, typer.Option("--request-id", help="Your name for this request; again, the same run.")
    ],
    resume: Annotated[
        str, typer.Option("--resume", help="Id of the run to go on with; not `newest`.")
    ] = "",
    summary: Annotated[
        Path | None, typer.Option("--summary", help="File to append a summary in Markdown to.")
    ] = None,
    detach: Detach = False,
    runs: Runs = RUNS,
) -> None:
    """Start a run at a launcher elsewhere, and follow it.

    FLOTILLA_LAUNCHER holds the content of that launcher's `runs/launcher.json`; without it, it is
    the launcher of `--runs`. Any key of the spec can be changed, as with `train`. Ctrl-C, and the
    end of the terminal, only stop following: the run goes on, `flotilla watch` follows it again and
    `flotilla cancel` stops it. Exit code: 0 completed, or begun with `--detach`, 1 failed or
    stopped, 2 bad spec, 130 interrupted.
    """
    from services.launcher.cli import submit as command

    submission = command.SubmitRequest(
        spec, list(context.args), request_id, resume, summary, detach
    )
    raise typer.Exit(command.submit_run(submission, runs))


def watch(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")] = "newest",
    runs: Runs = RUNS,
) -> None:
    """Follow a run to its end, whoever started it, and print what it came to.

    Ctrl-C only stops watching. At the launcher that FLOTILLA_LAUNCHER names, as for `submit`;
    without it, in `--runs`, where a run whose launcher died is given another. Exit code: 0
    completed, 1 failed or stopped, 130 interrupted.
    """
    from services.launcher.cli import watch as command

    raise typer.Exit(command.watch_run(run, runs))


def cancel(
    request_id: Annotated[str, typer.Argument(help="That of `flotilla submit`.")],
    grace: Grace = GRACE_S,
    runs: Runs = RUNS,
) -> None:
    """Stop the run that a `flotilla submit` began; if it began none, it never will.

    At the launcher that FLOTILLA_LAUNCHER names, as for `submit`; without it, at that of `--runs`.
    """
    from services.launcher.cli import cancel as command

    raise typer.Exit(command.cancel_request(request_id, runs, grace))


def reap(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="End nothing: say what would be ended, and why.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """End what runs of no run, and name runs that may have left something: then it exits with 1.

    By the launcher that FLOTILLA_LAUNCHER names, as for `submit`; without it, by that of `--runs`.
    Without a launcher one is started, and goes again; but not for `--dry-run`, because launchers
    end at their start what a dead one has left.
    """
    from services.launcher.cli import reap as command

    raise typer.Exit(command.reap_orphans(runs, dry_run=dry_run))


def join(
    address: Annotated[
        str, typer.Argument(help="IP address of the machine where the launcher is.")
    ],
    machine: Annotated[
        int,
        typer.Option("--machine", min=1, help="Its number among the replica's; 0 is the first."),
    ],
    service: Annotated[
        Literal["learner", "rollout"], typer.Option("--service", help="Whose machine this is.")
    ] = "learner",
    runs: Runs = RUNS,
) -> None:
    """Be a further machine of the run in `--runs`, a folder that the launcher's machine shares.

    Waits for the run, and ends when the service has ended in order; a run that has failed may be
    resumed, and is waited for again. SIGTERM and Ctrl-C leave in good order: the service is told
    first. Exit code: 0, or 1 where the process here fails again and again, 2 where it is refused.
    The run's spec has `launcher.local.network = "private"`, and the number of machines in
    `learner.rank.nodes` or `rollout.engine.nodes`.
    """
    from services.launcher.cli import join as command

    raise typer.Exit(command.join_run(command.JoinRequest(address, service, machine, runs)))

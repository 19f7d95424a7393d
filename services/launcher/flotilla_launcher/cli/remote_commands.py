"""Commands for a remote launcher: `flotilla submit`, `watch`, `cancel`, `reap` and `join`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flotilla_launcher.cli.options import (
    GRACE_S,
    OVERRIDES,
    RUNS,
    Detach,
    Grace,
    Priority,
    Runs,
)


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
        str,
        typer.Option(
            "--request-id", help="Your id of this request; a repeat follows the same run."
        ),
    ],
    resume: Annotated[
        str, typer.Option("--resume", help="Id of the run to resume; not `newest`.")
    ] = "",
    summary: Annotated[
        Path | None, typer.Option("--summary", help="File to which a Markdown summary is appended.")
    ] = None,
    detach: Detach = False,
    priority: Priority = 0,
    runs: Runs = RUNS,
) -> None:
    """Start a run at a remote launcher, and follow it, as `train` does with FLOTILLA_LAUNCHER set.
    If the GPUs there are taken, it waits in the queue.

    FLOTILLA_LAUNCHER holds the content of that launcher's `runs/launcher.json`; if it is unset, the
    launcher of `--runs` is used. Options override keys of the spec, as for `train`. Ctrl-C, or
    closing the terminal, only stops following: the run continues, `flotilla watch` follows it again
    and `flotilla cancel` stops it. Exit code: 0 completed, or started with `--detach`; 1 failed or
    stopped; 2 bad spec; 130 interrupted.
    """
    from flotilla_launcher.cli import train as command

    options = command.TrainOptions(
        resume=bool(resume),
        run_id=resume,
        update=True,
        detach=detach,
        priority=priority,
        request_id=request_id,
        summary=summary,
    )
    raise typer.Exit(command.train_policy(spec, runs, list(context.args), options))


def watch(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")] = "newest",
    runs: Runs = RUNS,
) -> None:
    """Follow any run to its end, and print its result.

    Ctrl-C only stops watching. Uses the launcher that FLOTILLA_LAUNCHER names, as `submit` does,
    else the runs of `--runs`, where a new launcher replaces a dead one. Exit code: 0 completed; 1
    failed or stopped; 130 interrupted.
    """
    from flotilla_launcher.cli import watch as command

    raise typer.Exit(command.watch_run(run, runs))


def cancel(
    request_id: Annotated[str, typer.Argument(help="The request id given to `flotilla submit`.")],
    grace: Grace = GRACE_S,
    runs: Runs = RUNS,
) -> None:
    """Stop the run that a `flotilla submit` started, or prevent it from ever starting one, as `stop
    --request` does.

    Uses the launcher that FLOTILLA_LAUNCHER names, as `submit` does, else that of `--runs`.
    """
    from flotilla_launcher.cli import stop as command

    raise typer.Exit(command.stop_request(request_id, grace, runs))


def reap(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="End nothing; list what would be ended, and why.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """End orphaned resources, and list runs that may have left something; then exit with 1.

    Uses the launcher that FLOTILLA_LAUNCHER names, as `submit` does, else that of `--runs`. If none
    runs, one is started for the time of the command; but not for `--dry-run`, because a launcher
    ends orphans when it starts.
    """
    from flotilla_launcher.cli import reap as command

    raise typer.Exit(command.reap_orphans(runs, dry_run=dry_run))


def join(
    address: Annotated[str, typer.Argument(help="IP address of the launcher's machine.")],
    machine: Annotated[
        int,
        typer.Option(
            "--machine",
            min=1,
            help="Number of this machine in the replica; machine 0 is the launcher's.",
        ),
    ],
    service: Annotated[
        Literal["learner", "rollout"], typer.Option("--service", help="Service of the replica.")
    ] = "learner",
    runs: Runs = RUNS,
) -> None:
    """Serve as a further machine of the run in `--runs`, a folder shared with the launcher.

    Waits for the run, and ends when the service has ended gracefully; after a failure it waits for
    the run to be resumed. SIGTERM and Ctrl-C leave gracefully, after notice to the service. Exit
    code: 0; 1 if the process here keeps failing; 2 if it is refused. The run's spec must set
    `launcher.local.network = "private"`, and the number of machines in `learner.rank.nodes` or
    `rollout.engine.nodes`.
    """
    from flotilla_launcher.cli import join as command

    raise typer.Exit(command.join_run(command.JoinRequest(address, service, machine, runs)))

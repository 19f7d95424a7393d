"""Commands for a launcher elsewhere: `flotilla submit`, `cancel` and `reap`."""

from pathlib import Path
from typing import Annotated

import typer

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
Runs = Annotated[Path, typer.Option("--runs", help="Folder of all runs.", show_default=True)]
RUNS = Path("runs")


def add_to(app: typer.Typer) -> None:
    app.command(context_settings=OVERRIDES)(submit)
    app.command()(cancel)
    app.command()(reap)


def submit(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec, TOML or JSON.", exists=True)],
    request_id: Annotated[
        str, typer.Option("--request-id", help="Your name for this request; again, the same run.")
    ],
    resume: Annotated[str, typer.Option("--resume", help="Id of the run to go on with.")] = "",
    summary: Annotated[
        Path | None, typer.Option("--summary", help="File to append a summary in Markdown to.")
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Start a run at a launcher elsewhere, and follow it.

    FLOTILLA_LAUNCHER holds the content of that launcher's `runs/launcher.json`; without it, it is
    the launcher of `--runs`. Any key of the spec can be changed, as with `train`. Ctrl-C stops the
    run. Exit code: 0 completed, 1 failed or stopped, 2 bad spec, 130 interrupted.
    """
    from services.launcher.console import submit as command

    wish = command.Wish(spec, list(context.args), request_id, resume, summary)
    raise typer.Exit(command.submit(wish, runs))


def cancel(
    request_id: Annotated[str, typer.Argument(help="That of `flotilla submit`.")],
    grace: Annotated[float, typer.Option(help="Seconds that draining may take.")] = 60.0,
    runs: Runs = RUNS,
) -> None:
    """Stop the run that a `flotilla submit` began; if it began none, it never will.

    At the launcher that FLOTILLA_LAUNCHER names, as for `submit`; without it, at that of `--runs`.
    """
    from services.launcher.console import submit as command

    raise typer.Exit(command.cancel(request_id, runs, grace))


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
    from services.launcher.console import submit as command

    raise typer.Exit(command.reap(runs, dry_run=dry_run))

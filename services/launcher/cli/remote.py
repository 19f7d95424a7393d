"""Commands for a launcher elsewhere: `flotilla submit`, `watch`, `cancel` and `reap`."""

import math
import os
from pathlib import Path
from typing import Annotated

import typer

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
RUNS = Path("runs")
GRACE_S = 60.0


def _check_folder(path: Path) -> Path:
    """Accept a folder that exists or can be made."""
    there = next((each for each in (path, *path.absolute().parents) if os.path.lexists(each)), path)
    if not there.is_dir():
        raise typer.BadParameter(f"{there} is no folder")
    return path


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= _GRACE_MAX_S:
        raise typer.BadParameter(f"{text!r}: give seconds, from 0 to {_GRACE_MAX_S:g}")
    return value


_GRACE_MAX_S = 7 * 86400.0
Runs = Annotated[
    Path,
    typer.Option("--runs", help="Folder of all runs.", show_default=True, callback=_check_folder),
]
Grace = Annotated[
    float, typer.Option("--grace", parser=_seconds, help="Seconds that draining may take.")
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Go as soon as the run has begun; it goes on.")
]


def add_remote_commands(app: typer.Typer) -> None:
    app.command(context_settings=OVERRIDES)(submit)
    app.command()(watch)
    app.command()(cancel)
    app.command()(reap)


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

    wish = command.SubmitRequest(spec, list(context.args), request_id, resume, summary, detach)
    raise typer.Exit(command.submit_run(wish, runs))


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
    from services.launcher.cli import submit as command

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
    from services.launcher.cli import submit as command

    raise typer.Exit(command.reap_orphans(runs, dry_run=dry_run))

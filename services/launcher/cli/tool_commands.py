"""Commands beside runs: `flotilla dump`, and `tiny` and `emulator`, which pass their arguments to
another tool."""

from pathlib import Path
from typing import Annotated

import typer

from services.common.process.child_environment import child_environment
from services.common.process.python_command import python_command
from services.launcher.cli.options import OVERRIDES


def add_tool_commands(app: typer.Typer) -> None:
    app.command()(dump)
    settings = {**OVERRIDES, "help_option_names": []}
    app.command(context_settings=settings)(tiny)
    app.command(context_settings=settings)(emulator)


def dump(
    file: Annotated[Path, typer.Argument(help="A launcher.sqlite or journal.sqlite.", exists=True)],
) -> None:
    """Print every table of a ledger or journal as JSON lines, whatever Flotilla wrote it."""
    from services.launcher.cli import dump as command

    raise typer.Exit(command.print_tables(file))


def tiny(context: typer.Context) -> None:
    """Build the demo's tiny policy: `flotilla tiny build --seed 0 --out build/tiny-0`.

    Takes the arguments of `python -m tools.tiny_policy`; `flotilla tiny --help` lists them.
    """
    import subprocess

    command = python_command("-m", "tools.tiny_policy", *context.args)
    raise typer.Exit(
        subprocess.run(command, check=False, env=child_environment(ours=True)).returncode
    )


def emulator(context: typer.Context) -> None:
    """Serve an emulator of Fleet on this machine: `flotilla emulator --port 8900`.

    Takes the arguments of `python -m environments.fleet_emulator`; `flotilla emulator --help` lists
    them and explains how to point Fleet's SDK at it.
    """
    import os

    # Replace this process, so that signals and a parent's end reach the emulator itself.
    command = python_command("-m", "environments.fleet_emulator", *context.args)
    os.execve(command[0], command, child_environment("FLOTILLA_ENV_TOKEN", ours=True))

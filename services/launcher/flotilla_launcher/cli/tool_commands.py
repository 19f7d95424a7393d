"""Commands beside runs: `flotilla dump`, `tinker-serve`, and those that are programs of their own,
to which they pass their arguments."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.extras import install_command
from flotilla_common.process.own_packages import folder_of
from flotilla_common.process.spec_commands import PROGRAMS, resolve_command
from flotilla_common.text.printable_text import print_visible
from flotilla_launcher.cli.options import OVERRIDES

# Context of a command whose options another program reads, `--help` among them.
PASSED_ON = {**OVERRIDES, "help_option_names": []}
# If it is set, an environment's server requires it of clients.
ENVIRONMENT_KEY = "FLOTILLA_ENV_TOKEN"


def add_tool_commands(app: typer.Typer) -> None:
    app.command()(dump)
    app.command()(tinker_serve)
    for program in (tasks, gsm8k, fleet_booking, tiny, emulator):
        app.command(context_settings=PASSED_ON)(program)


def dump(
    file: Annotated[Path, typer.Argument(help="A launcher.sqlite or journal.sqlite.", exists=True)],
) -> None:
    """Print every table of a ledger or journal as JSON lines, whatever Flotilla wrote it."""
    from flotilla_launcher.cli import dump as command

    raise typer.Exit(command.print_tables(file))


def tinker_serve(
    model: Annotated[str, typer.Argument(help="A model's folder, or its name on the hub.")],
    listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where clients come in; beyond loopback with TLS."),
    ] = "127.0.0.1:8700",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="SPEC",
            help="Run spec of the three services, in place of one for this machine: [policy],"
            " [learner.rank], [learner.training], [rollout.engine], [rollout.sampling], [tinker].",
            exists=True,
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option(help="Where models, futures, logs and the key are kept.")
    ] = Path("tinker"),
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Set a key of the spec: policy.max_model_len=8192."
        ),
    ] = None,
) -> None:
    """Train and sample by programs for the Tinker SDK, on this machine: `flotilla tinker-serve
    Qwen/Qwen3-0.6B`.

    Starts a trainer, a sampler (vLLM) and the server of the SDK's protocol, and prints the two
    variables that a client needs. Then any script or cookbook recipe of SDK 0.38 runs against it.
    A process that dies is started again. Ctrl-C ends all; the same command goes on where it ended:
    sessions, models, samplers, checkpoints and results are in the folder. Exit code: 0 ended by
    Ctrl-C, 1 failed, 2 bad spec.
    """
    from flotilla_launcher.cli import tinker_serve as command

    wish = command.TinkerServing(model, listen, config, folder, settings or [])
    raise typer.Exit(command.serve_tinker(wish))


def become_program(name: str, arguments: Sequence[str], *variables: str) -> NoReturn:
    """Replace this process by one of `flotilla`'s programs, so that signals and a parent's end
    reach that one. It gets `variables` besides those of every child."""
    package = PROGRAMS[name].partition(".")[0]
    if folder_of(package) is None:
        fix = install_command("environments")
        print_visible(f"error: {sys.executable} has no {package}: {fix}", file=sys.stderr)
        raise typer.Exit(1)
    command = resolve_command(("flotilla", *name.split(), *arguments))
    os.execve(command[0], command, child_environment(*variables, ours=True))


def tasks(context: typer.Context) -> None:
    """Write a file of generated tasks: `flotilla tasks --split train --count 1200 --out FILE`.

    They are for the environments of `flotilla env serve`, in Fleet's JSON. `flotilla tasks --help`
    explains splits, environments and solutions.
    """
    become_program("tasks", context.args)


def gsm8k(context: typer.Context) -> None:
    """Write a task file of questions: `flotilla gsm8k --from openai/gsm8k --out FILE`.

    From GSM8K or data like it, on the hub or in a file, or generated (`--from arithmetic`).
    `flotilla gsm8k --help` explains the options.
    """
    become_program("gsm8k", context.args, "HF_TOKEN")


def fleet_booking(context: typer.Context) -> None:
    """Make Fleet's booking tasks fit our copy of that site: `flotilla fleet-booking tasks FILE`.

    `flotilla env serve --env fleet_booking` serves the site.
    """
    become_program("fleet-booking", context.args)


def tiny(context: typer.Context) -> None:
    """Build the demo's tiny policy: `flotilla tiny build --seed 0 --out build/tiny-0`.

    `flotilla tiny --help` lists its commands: `build`, `fit` for tools of one's own, `evaluate`.
    """
    become_program("tiny", context.args)


def emulator(context: typer.Context) -> None:
    """Serve an emulator of Fleet on this machine: `flotilla emulator --port 8900`.

    `flotilla emulator --help` lists its options and explains how to point Fleet's SDK at it.
    """
    become_program("emulator", context.args, ENVIRONMENT_KEY)

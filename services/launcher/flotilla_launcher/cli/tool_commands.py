"""Commands beside runs: `flotilla dump`, `tinker-serve`, and `tiny` and `emulator`, which pass
their arguments to another tool."""

from pathlib import Path
from typing import Annotated

import typer

from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command
from flotilla_launcher.cli.options import OVERRIDES


def add_tool_commands(app: typer.Typer) -> None:
    app.command()(dump)
    app.command()(tinker_serve)
    settings = {**OVERRIDES, "help_option_names": []}
    app.command(context_settings=settings)(tiny)
    app.command(context_settings=settings)(emulator)


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


def tiny(context: typer.Context) -> None:
    """Build the demo's tiny policy: `flotilla tiny build --seed 0 --out build/tiny-0`.

    Takes the arguments of `python -m flotilla_environments.tiny_policy`; `flotilla tiny --help`
    lists them.
    """
    import subprocess

    command = python_command("-m", "flotilla_environments.tiny_policy", *context.args)
    raise typer.Exit(
        subprocess.run(command, check=False, env=child_environment(ours=True)).returncode
    )


def emulator(context: typer.Context) -> None:
    """Serve an emulator of Fleet on this machine: `flotilla emulator --port 8900`.

    Takes the arguments of `python -m flotilla_environments.fleet_emulator`; `flotilla emulator
    --help` lists them and explains how to point Fleet's SDK at it.
    """
    import os

    # Replace this process, so that signals and a parent's end reach the emulator itself.
    command = python_command("-m", "flotilla_environments.fleet_emulator", *context.args)
    os.execve(command[0], command, child_environment("FLOTILLA_ENV_TOKEN", ours=True))

"""Commands for environments: `flotilla env status` and `flotilla env try`."""

from pathlib import Path
from typing import Annotated

import typer

from services.launcher.cli.options import OVERRIDES, RUNS, Runs


def add_env_commands(app: typer.Typer) -> None:
    env = typer.Typer(
        name="env",
        no_args_is_help=True,
        help="Shows the environments of a run, and plays an episode by hand.",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    env.command(name="status")(env_status)
    env.command(name="try", context_settings=OVERRIDES)(env_try)
    app.add_typer(env)


def env_status(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")] = "newest",
    address: Annotated[
        str | None,
        typer.Option(
            "--address", help="HOST:PORT of a gateway; its token is read from FLOTILLA_TOKEN."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as one JSON object.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Show episodes by state, limits, error rates, and grades with reasons for missing ones.

    Reads the run's files, so run it on the launcher's machine; FLOTILLA_LAUNCHER has no effect.
    """
    from services.launcher.cli import env_status as command

    raise typer.Exit(command.env_status(run, runs, address, as_json=as_json))


def env_try(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec; only its [env_gateway] is used.")],
    tasks: Annotated[Path, typer.Argument(help="Task file.")],
    key: Annotated[str | None, typer.Option(help="Key of the task (default: the first).")] = None,
    answer: Annotated[str | None, typer.Option(help="The final answer to grade.")] = None,
) -> None:
    """Play one episode by hand: show a policy's observations and the reward.

    Reads tool calls from standard input, one a line: a name and a JSON object. At the end of input
    the episode is graded. Options such as `--env_gateway.backend=...` override the spec. Exit code:
    0 graded, 1 not graded.
    """
    from services.launcher.cli import env_try as command

    raise typer.Exit(command.env_try(spec, tasks, key, answer, context.args))

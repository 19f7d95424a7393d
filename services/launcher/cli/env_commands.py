"""Commands for environments: `flotilla env status` and `flotilla env try`."""

from pathlib import Path
from typing import Annotated

import typer

from services.launcher.cli.options import OVERRIDES, RUNS, Runs


def add_env_commands(app: typer.Typer) -> None:
    env = typer.Typer(
        name="env",
        no_args_is_help=True,
        help="Looks at the environments of a run, and tries one by hand.",
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
            "--address", help="HOST:PORT of a gateway; its token is taken from FLOTILLA_TOKEN."
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Everything, as one JSON object.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Show episodes by state, limits, error rates, and grades with the reasons for missing ones.

    Reads files of the run, so it works where its launcher is, not by FLOTILLA_LAUNCHER.
    """
    from services.launcher.cli import env_status as command

    raise typer.Exit(command.env_status(run, runs, address, as_json=as_json))


def env_try(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec; its [env_gateway] is what counts.")],
    tasks: Annotated[Path, typer.Argument(help="Task file.")],
    key: Annotated[str | None, typer.Option(help="Key of the task (default: the first).")] = None,
    answer: Annotated[str | None, typer.Option(help="The final answer to grade.")] = None,
) -> None:
    """Play one episode by hand: what a policy would see, and what it would earn.

    Tool calls come from standard input, a name and a JSON object a line; at its end the episode is
    graded. `--env_gateway.backend=...` and the like override the spec. Exit code: 0 graded, 1 not.
    """
    from services.launcher.cli import env_try as command

    raise typer.Exit(command.env_try(spec, tasks, key, answer, context.args))

"""The `flotilla` command. Everything heavy is imported by the command that needs it."""

import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from services.common.printable_text import say
from services.common.private_process import keep_private, refuse_core_dumps
from services.launcher.cli import env_commands, reading_commands, remote_commands, tool_commands
from services.launcher.cli.options import (
    GRACE_S,
    OVERRIDES,
    RUNS,
    AcceptLoss,
    Detach,
    Gpus,
    Grace,
    Resume,
    ResumedRun,
    Runs,
    Update,
)

# What these make is no part of a run: whoever may read it is the user's choice.
_WRITES_FOR_OTHERS = ("export", "tiny", "emulator")

app = typer.Typer(
    name="flotilla",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Trains tool-use agents with reinforcement learning, as four services that one command"
        " starts, watches and ends.\n\n"
        "Begin with `flotilla train deploy/runs/local.toml`. It trains a tiny policy on this"
        " machine in a few minutes, needs no GPU and no account, and ends with a before/after"
        " table. Everything of a run is under `runs/RUN_ID/`."
    ),
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of

        say(f"flotilla {version_of('flotilla')}")
    elif context.invoked_subcommand is None:
        context.fail("name a command; --help lists them")


@app.command(context_settings=OVERRIDES)
def train(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec, TOML or JSON.", exists=True)],
    resume: Resume = False,
    run_id: ResumedRun = None,
    update: Update = False,
    accept_loss: AcceptLoss = False,
    detach: Detach = False,
    runs: Runs = RUNS,
) -> None:
    """Train a policy from a run spec, and show how it learns.

    Any key of the spec can be changed for this run: `--learner.steps=10`, `--seed=1`,
    `--rollout.engine.max_num_seqs=128`.

    Ctrl-C stops every process in good order and prints the command that goes on from there; a
    second Ctrl-C stops at once. The end of the terminal is a Ctrl-C too; with `--detach`, and under
    `nohup`, the run outlives it, and `flotilla watch` follows it. A run that cannot be resumed is
    never begun anew in its place. Exit code: 0 completed, or begun with `--detach`, 1 failed, 2 bad
    spec, 130 interrupted.
    """
    from services.launcher.cli import train as command

    extra = list(context.args)
    if run_id is not None and run_id.startswith("--"):
        extra, run_id = [run_id, *extra], None
    if not resume:
        _require_resume(run_id, update=update, accept_loss=accept_loss)
    _exit_with(
        command.train_policy(
            *(spec, runs, extra),
            resume=resume,
            run_id=run_id,
            update=update,
            accept_loss=accept_loss,
            detach=detach,
        )
    )


def _require_resume(run_id: str | None, *, update: bool, accept_loss: bool) -> None:
    """Refuse what only a resumed run can be given."""
    if run_id is not None:
        raise typer.BadParameter(f"{run_id!r}: a run id goes with --resume", param_hint="RUN")
    for given, name in ((update, "--update"), (accept_loss, "--accept-loss")):
        if given:
            raise typer.BadParameter("it goes with --resume", param_hint=name)


@app.command(name="eval", context_settings=OVERRIDES)
def evaluate(
    context: typer.Context,
    target: Annotated[
        str, typer.Argument(metavar="SPEC|RUN", help="Run spec, id of a run, or `newest`.")
    ],
    runs: Runs = RUNS,
) -> None:
    """Evaluate the newest checkpoint of a run on its held-out tasks, without training.

    With a spec: its newest run, or the initial policy if there is none.
    """
    from services.launcher.cli import train as command

    _exit_with(command.evaluate_policy(target, runs, list(context.args)))


@app.command(context_settings=OVERRIDES)
def plan(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec, TOML or JSON.", exists=True)],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write SkyPilot's task files to.")
    ] = None,
    one_machine: Annotated[
        bool,
        typer.Option("--one-machine", help="All services on one machine, by plain `sky launch`."),
    ] = False,
    gpus: Gpus = None,
    runs: Runs = RUNS,
) -> None:
    """Show which machines a run would ask SkyPilot for, at what price, and its task files.

    Starts nothing, and needs neither SkyPilot nor a network. Prices are those of the catalog that
    SkyPilot keeps in `~/.sky`. Memory of ranks and engines is computed where the model's
    config.json is here. Exit code: 0, or 2 for a bad spec, and for one that does not fit.
    """
    from services.common import log
    from services.launcher.cli import plan as command

    log.setup("plan", "", level="WARNING")
    _exit_with(
        command.print_plan(
            spec,
            runs,
            list(context.args),
            out,
            one_machine=one_machine,
            gpus=gpus.each if gpus else (),
        )
    )


# Between the commands above and below, for `--help` lists them in this order.
reading_commands.add_reading_commands(app)


@app.command()
def scale(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")],
    counts: Annotated[list[str], typer.Argument(metavar="SERVICE=N...", help="As in rollout=2.")],
    runs: Runs = RUNS,
) -> None:
    """Set how many replicas a service has, in mid-run. Fewer drain before they stop.

    At the launcher that FLOTILLA_LAUNCHER names, as for `submit`; without it, at that of `--runs`.
    """
    from services.launcher.cli import scale as command

    _exit_with(command.scale_services(run, counts, runs))


@app.command()
def stop(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")],
    grace: Grace = GRACE_S,
    runs: Runs = RUNS,
) -> None:
    """Stop a run in good order; it can be resumed.

    At the launcher that FLOTILLA_LAUNCHER names, as for `submit`; without it, at that of `--runs`.
    """
    from services.launcher.cli import stop as command

    _exit_with(command.stop_run(run, grace, runs))


@app.command(context_settings=OVERRIDES)
def doctor(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec, TOML or JSON.", exists=True)],
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON array of {probe, status, detail}.")
    ] = False,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", help="Leave this probe out; repeatable.")
    ] = None,
    node: Annotated[
        list[str] | None,
        typer.Option(
            "--node", help="HOST:PORT of an echo_server there, for `echo` and `ring`; repeatable."
        ),
    ] = None,
    tls_dir: Annotated[
        Path | None, typer.Option("--tls-dir", help="Certificates to call nodes with.")
    ] = None,
    gpus: Gpus = None,
    runs: Runs = RUNS,
) -> None:
    """Look for what would make a run fail, before it costs anything.

    Keys are tried where they are good for, ports, memory and disk are compared with what the spec
    asks for, and one episode of each environment is opened. Before a run is started on rented
    machines all of this runs by itself. Exit code: 0 nothing failed, 1 something did.
    """
    from services.launcher.cli import doctor as command

    found = command.run_doctor(
        spec,
        runs,
        skip or [],
        node or [],
        tls_dir,
        context.args,
        as_json=as_json,
        gpus=gpus.each if gpus else (),
    )
    _exit_with(found)


# After the commands above, for `--help` lists them in this order.
env_commands.add_env_commands(app)
remote_commands.add_remote_commands(app)
tool_commands.add_tool_commands(app)


def _exit_with(code: int) -> None:
    raise typer.Exit(code)


def main() -> None:
    """Entry point of the `flotilla` command."""
    if sys.argv[1:2] and sys.argv[1] in _WRITES_FOR_OTHERS:
        refuse_core_dumps()
    else:
        keep_private()
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception:  # noqa: BLE001
        # A fault of this program's; the words that it quotes may be anybody's.
        say(traceback.format_exc(), end="", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()

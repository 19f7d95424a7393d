"""The `flotilla` command. Each command imports heavy modules only when it runs."""

import sqlite3
import sys
import traceback
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from flotilla_common.domain.pass_rates import PASS_REWARD
from flotilla_common.process.private_process import keep_private, refuse_core_dumps
from flotilla_common.text.printable_text import print_visible
from flotilla_launcher.cli import (
    data_commands,
    env_commands,
    eval_commands,
    init_commands,
    reading_commands,
    remote_commands,
    result_commands,
    tool_commands,
)
from flotilla_launcher.cli.options import (
    GRACE_S,
    OVERRIDES,
    RUNS,
    AcceptLoss,
    Detach,
    Gpus,
    Grace,
    Priority,
    Resume,
    ResumedRun,
    Runs,
    Update,
    Wait,
)

# Commands whose output is no part of a run: the user's umask decides who may read it.
_WRITES_FOR_OTHERS = ("export", "data", "tasks", "gsm8k", "fleet-booking", "tiny", "emulator")

app = typer.Typer(
    name="flotilla",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=(
        "Trains tool-use agents with reinforcement learning, as four services that one command"
        " starts, watches and ends.\n\n"
        "Start with `flotilla demo`. It trains a tiny policy on this machine in a few minutes,"
        " without a GPU or an account, and prints a before/after table. All files of a run are"
        " under `runs/RUN_ID/`."
    ),
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from flotilla_common.process.own_version import own_version

        print_visible(str(own_version()))
    elif context.invoked_subcommand is None:
        context.fail("name a command; --help lists them")


@app.command(context_settings=OVERRIDES)
def demo(
    context: typer.Context,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Install what is missing without a question.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the demo's newest run in this folder.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Train a tiny policy on three tool-use environments, in any folder: `flotilla demo --seed=1`.

    Needs no GPU. Without vLLM, torch or the services it says how large they are and where they
    come from, asks, and installs them into an environment of its own; later calls use that. Writes
    to `./runs` and `./build`. Options such as `--learner.steps=10` override keys of its spec.
    Ctrl-C and exit codes are those of `train`.
    """
    from flotilla_launcher.cli import demo as command
    from flotilla_launcher.cli.train import TrainOptions

    options = TrainOptions(resume)
    raise typer.Exit(command.run_demo(runs, list(context.args), options, agreed=yes))


@app.command(context_settings=OVERRIDES)
def train(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec, TOML or JSON.", exists=True)],
    resume: Resume = False,
    run_id: ResumedRun = None,
    update: Update = False,
    accept_loss: AcceptLoss = False,
    detach: Detach = False,
    wait: Wait = False,
    priority: Priority = 0,
    runs: Runs = RUNS,
) -> None:
    """Train a policy from a run spec, and show its progress.

    Options override keys of the spec: `--learner.steps=10`, `--seed=1`,
    `--rollout.engine.max_num_seqs=128`.

    Ctrl-C stops every process gracefully and prints the command that resumes the run; a second
    Ctrl-C stops at once. Closing the terminal counts as Ctrl-C; with `--detach`, or under `nohup`,
    the run survives it, and `flotilla watch` follows it. If a run cannot be resumed, no new run
    replaces it. With FLOTILLA_LAUNCHER set, it is `flotilla submit`: Ctrl-C only stops following.
    Exit code: 0 completed, or started with `--detach`; 1 failed; 2 bad spec; 130 interrupted.
    """
    from flotilla_launcher.cli import train as command

    extra = list(context.args)
    if run_id is not None and run_id.startswith("--"):
        extra, run_id = [run_id, *extra], None
    if not resume:
        _require_resume(run_id, update=update, accept_loss=accept_loss)
    options = command.TrainOptions(
        resume, run_id or "", update, accept_loss, detach, wait, priority
    )
    raise typer.Exit(command.train_policy(spec, runs, extra, options))


def _require_resume(run_id: str | None, *, update: bool, accept_loss: bool) -> None:
    if run_id is not None:
        raise typer.BadParameter(f"{run_id!r}: a run id requires --resume", param_hint="RUN")
    for given, name in ((update, "--update"), (accept_loss, "--accept-loss")):
        if given:
            raise typer.BadParameter("it requires --resume", param_hint=name)


@app.command(context_settings=OVERRIDES)
def sft(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec, TOML or JSON.", exists=True)],
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="Run whose episodes are imitated: an id, or `newest`; or a file or folder of"
            " conversations.",
        ),
    ],
    min_reward: Annotated[
        float, typer.Option("--min-reward", help="Least reward of an episode that is imitated.")
    ] = PASS_REWARD,
    best_of: Annotated[
        int | None,
        typer.Option(
            "--best-of",
            min=1,
            help="Only the best of each so many graded attempts at a task, in the run's order.",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", help="A key of a file's rows that is not looked at; repeatable."),
    ] = None,
    warm_start: Annotated[
        bool,
        typer.Option(
            "--warm-start",
            help="Then train as the spec says; its learner.warm_start says how to imitate.",
        ),
    ] = False,
    detach: Detach = False,
    wait: Wait = False,
    priority: Priority = 0,
    runs: Runs = RUNS,
) -> None:
    """Train a policy to imitate recorded episodes or conversations (supervised fine-tuning).

    Of a run it reads the journal, and its dumps where the journal has pruned tokens: both hold the
    exact token ids and who wrote each, so nothing is rendered if the model has the tokenizer and
    chat template of that run. Evaluations are never imitated. Messages of another run, and of a
    file or folder (JSON lines, JSON, Parquet, a `datasets` folder, `flotilla data collect`), are
    rendered by the dialect of the spec; what the policy would have sampled is trained.

    The demonstrations go to `runs/demonstrations/NAME-DIGEST.npz`, which becomes
    `learner.sft.data`; then it does what `train` does with `learner.objective = "sft"`. Options
    override keys of the spec, which needs `learner.sft.sequences_per_step` and `learner.steps`. If
    `learner.eval.sets` is empty, the learner is the run's only process. With `--warm-start` the
    table is `[learner.warm_start]`, and reinforcement learning follows in the same run.

    `flotilla train SPEC --resume`, as printed at Ctrl-C, continues the run with the same file.
    `python -m flotilla_reading.demonstrations` only writes the file. Exit code: that of `train`.
    """
    from flotilla_launcher.cli import sft as command
    from flotilla_launcher.cli.train import TrainOptions
    from flotilla_reading.demonstrations.acceptance import AcceptanceRules

    rules = AcceptanceRules(min_reward, best_of)
    request = command.ImitationRequest(source, rules, ignore or (), warm_start)
    options = TrainOptions(detach=detach, wait=wait, priority=priority)
    raise typer.Exit(command.imitate_run(spec, runs, list(context.args), request, options))


eval_commands.add_eval_commands(app)


@app.command(context_settings=OVERRIDES)
def plan(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec, TOML or JSON.", exists=True)],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder to write SkyPilot's task files to.")
    ] = None,
    one_machine: Annotated[
        bool,
        typer.Option(
            "--one-machine", help="All services on one machine, started by plain `sky launch`."
        ),
    ] = False,
    gpus: Gpus = None,
    runs: Runs = RUNS,
) -> None:
    """Show the machines that a run would request from SkyPilot, their prices, and the task files.

    Starts nothing, and needs neither SkyPilot nor a network. Prices come from SkyPilot's catalog in
    `~/.sky`. The memory of ranks and engines is computed if the model's config.json is on this
    machine. Exit code: 0; 2 for a bad spec, or one that does not fit into memory.
    """
    from flotilla_common.telemetry import log
    from flotilla_launcher.cli import plan as command

    log.setup("plan", "", level="WARNING")
    raise typer.Exit(
        command.print_plan(
            spec,
            runs,
            list(context.args),
            out,
            one_machine=one_machine,
            gpus=gpus.each if gpus else (),
        )
    )


# Added here because `--help` lists commands in this order.
reading_commands.add_reading_commands(app)
result_commands.add_result_commands(app)


@app.command()
def scale(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")],
    counts: Annotated[
        list[str], typer.Argument(metavar="SERVICE=N...", help="Example: rollout=2.")
    ],
    runs: Runs = RUNS,
) -> None:
    """Set the number of replicas of a service in a running run. Surplus replicas drain first.

    Uses the launcher that FLOTILLA_LAUNCHER names, as `submit` does, else that of `--runs`.
    """
    from flotilla_launcher.cli import scale as command

    raise typer.Exit(command.scale_services(run, counts, runs))


@app.command()
def stop(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")],
    request: Annotated[
        bool,
        typer.Option(
            "--request", help="RUN is a request id: stop its run, or prevent it from ever starting."
        ),
    ] = False,
    grace: Grace = GRACE_S,
    runs: Runs = RUNS,
) -> None:
    """Stop a run gracefully; it can be resumed.

    Uses the launcher that FLOTILLA_LAUNCHER names, as `submit` does, else that of `--runs`.
    """
    from flotilla_launcher.cli import stop as command

    raise typer.Exit(
        command.stop_request(run, grace, runs) if request else command.stop_run(run, grace, runs)
    )


@app.command(context_settings=OVERRIDES)
def doctor(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec, TOML or JSON.", exists=True)],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON array of {probe, status, detail}.")
    ] = False,
    skip: Annotated[
        list[str] | None, typer.Option("--skip", help="Skip this probe; repeatable.")
    ] = None,
    gpus: Gpus = None,
    runs: Runs = RUNS,
) -> None:
    """Find the causes that would make a run fail, before it costs money.

    Tries API keys, compares ports, memory and disk with the spec, and opens one episode of each
    environment. A run on rented machines passes these probes automatically before it starts. Exit
    code: 0 no probe failed, 1 a probe failed.
    """
    from flotilla_launcher.cli import doctor as command

    found = command.run_doctor(
        spec,
        runs,
        skip or [],
        context.args,
        as_json=as_json,
        gpus=gpus.each if gpus else (),
    )
    raise typer.Exit(found)


# Added last because `--help` lists commands in this order.
env_commands.add_env_commands(app)
data_commands.add_data_commands(app)
remote_commands.add_remote_commands(app)
init_commands.add_init_command(app)
tool_commands.add_tool_commands(app)


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
    except sqlite3.OperationalError as error:
        _fail(f"error: the ledger of the runs folder cannot be used: {error}")
    except OSError as error:
        # A file that the user has named, or that is below it. Any other is a defect.
        if error.filename is None:
            _fail(traceback.format_exc().rstrip())
        _fail(f"error: cannot use {error.filename}: {error.strerror}")
    except Exception:  # noqa: BLE001
        # A defect of this program; its traceback may quote untrusted text.
        _fail(traceback.format_exc().rstrip())


def _fail(text: str) -> NoReturn:
    print_visible(text, file=sys.stderr)
    sys.exit(1)


if __name__ == "__main__":
    main()

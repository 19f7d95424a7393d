"""Commands that show what is known of runs, and change nothing of them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from services.launcher.cli.options import RUNS, Runs


def add_reading_commands(app: typer.Typer) -> None:
    for command in (status, logs, show, inspect, export, export_trajectories):
        app.command()(command)


def status(
    run: Annotated[
        str | None, typer.Argument(help="Id of a run, or `newest`; all runs when absent.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object; see docs/running.md.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Show all runs, or one run with its services and its numbers.

    Those of the launcher that FLOTILLA_LAUNCHER names, as for `submit`; without it, of `--runs`.
    """
    from services.launcher.cli import status as command

    raise typer.Exit(command.show_status(run, runs, as_json=as_json))


def logs(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")],
    service: Annotated[
        str, typer.Argument(help="env_gateway, learner or rollout; all when absent.")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, max=1_000_000, help="Last lines to begin with.")
    ] = 50,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line, as in a pipe.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Print what the services of a run have logged.

    At the launcher that FLOTILLA_LAUNCHER names, as for `submit`; without it, in `--runs`.
    """
    from services.launcher.cli import logs as command

    raise typer.Exit(
        command.show_logs(run, service, runs, follow=follow, lines=lines, as_json=as_json)
    )


def show(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Attempts that this step trained on.")
    ] = None,
    env: Annotated[str | None, typer.Option("--env", help="Attempts in this environment.")] = None,
    group: Annotated[str | None, typer.Option("--group", help="Attempts of this group.")] = None,
    passed: Annotated[
        bool | None,
        typer.Option("--passed/--failed", help="Rewards of at least 1; or everything else."),
    ] = None,
    count: Annotated[int, typer.Option("-n", min=1, help="At most so many attempts.")] = 3,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="Model folder with the tokenizer; the run's own if absent."),
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="Whole answers of tools that the policy saw cut.")
    ] = False,
    tasks: Annotated[
        bool, typer.Option("--tasks", help="Tasks that are parked or quarantined instead.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Show what the agent did: prompt, turns, observations, reward and checks.

    Attempts whose text is kept come first, the newest before older ones. Checkpoints drop the
    text of attempts that are trained, but for the first group of each step.

    Reads files of the run, so it works where these are, not by FLOTILLA_LAUNCHER.
    """
    from services.launcher.cli import show as command

    chosen = command.AttemptFilter(step, env, group, passed, count)
    raise typer.Exit(
        command.show_tasks(run, runs)
        if tasks
        else command.show_attempts(run, runs, chosen, policy, whole=whole)
    )


def inspect(
    run: Annotated[
        str | None, typer.Argument(help="Id of a run, or `newest`; all runs when absent.")
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on loopback; 0 is any free one.")
    ] = 0,
    browse: Annotated[
        bool,
        typer.Option("--browser/--no-browser", help="Open it in this machine's browser."),
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", help="Write the pages to this zip file instead of serving them."),
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option("--step", min=0, help="A step to bundle; may be repeated (the newest)."),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", help="Model folder with the tokenizer; the run's own if absent."),
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Show runs in a browser: curves, groups, episodes, and every token with its numbers.

    The page is on loopback, and its address carries a token that is new at each start. Works on
    running and finished runs; a page left open for hours costs the learner nothing. `--bundle`
    makes a file for a colleague, who needs neither Flotilla nor the run.

    Of a launcher that FLOTILLA_LAUNCHER names it fetches what a run's pages need, and goes on while
    the run does; without RUN, of the newest. A run in `--runs` is read there.
    """
    from services.launcher.cli import inspect as command

    if bundle is None and step:
        raise typer.BadParameter("--step goes with --bundle")
    if bundle is None:
        options = command.PageOptions(port, browse, policy)
        raise typer.Exit(command.inspect_runs(run, runs, options))
    raise typer.Exit(command.write_bundle(run or "newest", runs, bundle, step or [], policy))


def export(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; must not be there yet.")],
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, help="Step of a checkpoint; the newest if absent."),
    ] = None,
    adapters: Annotated[
        bool, typer.Option("--adapters", help="The adapters of learner.lora alone, for PEFT.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Write the model of a run in Hugging Face's format, for transformers and vLLM.

    With tokenizer, chat template and generation config; `sha256sum -c SHA256SUMS` checks it. A run
    that is complete has that of its last step in `runs/RUN_ID/model`. Adapters of `learner.lora`
    are merged in, unless `--adapters` asks for them alone.

    Reads files of the run, so it works where these are, not by FLOTILLA_LAUNCHER.
    """
    from services.launcher.cli import export as command

    raise typer.Exit(command.export_model(run, step, out, runs, adapters=adapters))


def export_trajectories(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write; must not be there yet.")],
    form: Annotated[
        Literal["parquet", "datasets"],
        typer.Option("--format", help="All numbers in a file, or a folder for `load_dataset`."),
    ] = "parquet",
    env: Annotated[str | None, typer.Option("--env", help="Attempts in this environment.")] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Attempts that this step counted.")
    ] = None,
    passed: Annotated[
        bool, typer.Option("--passed", help="Attempts with a reward of at least 1 alone.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Write the episodes of a run: conversations with tool calls, rewards, tokens.

    `datasets` is for supervised training elsewhere: `load_dataset(DIR)` has `messages` in its rows.
    Attempts whose tokens were pruned, and of which no dump is kept, are left out and counted.

    Reads files of the run, so it works where these are, not by FLOTILLA_LAUNCHER.
    """
    from services.launcher.cli import export_trajectories as command

    arguments = [f"--format={form}", *(["--passed"] if passed else [])]
    arguments += [f"--env={env}"] if env is not None else []
    arguments += [f"--step={step}"] if step is not None else []
    raise typer.Exit(command.export_trajectories(run, out, runs, arguments))

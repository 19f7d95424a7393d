"""Read-only commands about runs."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from flotilla_launcher.cli.options import RUNS, Runs, parse_since, refuse_without_effect
from flotilla_launcher.state import RunState


def add_reading_commands(app: typer.Typer) -> None:
    reading = (status, runs, logs, show, inspect, analyze, report)
    for command in (*reading, export_trajectories):
        app.command()(command)


State = Annotated[
    list[RunState] | None, typer.Option("--state", help="Only runs in this state; repeatable.")
]
Name = Annotated[
    str, typer.Option("--name", help="Only runs of the spec with this name, such as `qwen*`.")
]
Since = Annotated[
    float,
    typer.Option(
        "--since",
        parser=parse_since,
        metavar="AGE|DATE",
        help="Only runs created since then: `12h`, `7d`, or `2026-11-20T08:00` in UTC.",
        show_default=False,
    ),
]
Count = Annotated[int, typer.Option("--count", "-n", min=0, help="Maximum number of runs; 0: all.")]
After = Annotated[
    str, typer.Option("--after", help="Only runs older than this one, for the next page.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object; see docs/running.md.")]


def status(
    run: Annotated[
        str | None, typer.Argument(help="Id of a run, or `newest`; all runs when absent.")
    ] = None,
    state: State = None,
    name: Name = "",
    since: Since = 0.0,
    count: Count = 100,
    after: After = "",
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """List runs, newest first, or show one run with its services and metrics.

    If runs are left out, the last line says how many; `flotilla runs` filters, sorts and compares
    them by more. Uses the launcher that FLOTILLA_LAUNCHER names, as `submit` does, else the runs of
    `--runs`.
    """
    from flotilla_launcher.cli import runs as listing
    from flotilla_launcher.cli import status as command

    if run is not None:
        if state or name or since or after:
            raise typer.BadParameter("--state, --name, --since and --after choose among all runs")
        raise typer.Exit(command.show_status(run, runs, as_json=as_json))
    chosen = listing.RunChoice(tuple(state or ()), name, since, count, after)
    raise typer.Exit(listing.list_runs(runs, chosen, as_json=as_json))


def runs(
    context: typer.Context,
    compared: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RUN RUN...]", help="Ids of runs to compare; none: list all."),
    ] = None,
    state: State = None,
    name: Name = "",
    since: Since = 0.0,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="KEY=VALUE",
            help="Only runs whose spec says so, such as `learner.optimizer.lr=1e-5`; repeatable.",
        ),
    ] = None,
    columns: Annotated[
        str,
        typer.Option(
            "--columns",
            metavar="NAME,...",
            help="Metrics (their newest values) and keys of the spec, instead of the pass rates.",
        ),
    ] = "",
    sort: Annotated[
        str,
        typer.Option(
            "--sort",
            metavar="NAME",
            help="By a metric or a key, the largest first; `-NAME`: the smallest first.",
        ),
    ] = "",
    count: Count = 100,
    after: After = "",
    as_json: AsJson = False,
    runs: Runs = RUNS,
) -> None:
    """List runs as an experiment log, or compare some: what differs between their specs, and their
    newest metrics.

    `flotilla runs --name qwen* --columns eval/all/pass_at_1,learner.optimizer.lr --sort
    eval/all/pass_at_1` ranks runs. A key that a spec leaves to its default has no value here. Uses
    the launcher that FLOTILLA_LAUNCHER names, as `submit` does, else the runs of `--runs`.
    """
    from flotilla_common.spec.text_lists import split_list
    from flotilla_launcher.cli import runs as command

    chosen_columns = split_list(columns)
    if compared:
        besides = ("compared", "columns", "as_json", "runs")
        refuse_without_effect(context, "named runs, which are compared", besides=besides)
        if len(compared) == 1:
            raise typer.BadParameter(f"name another run; `flotilla status {compared[0]}` shows one")
        raise typer.Exit(command.compare_runs(compared, runs, chosen_columns, as_json=as_json))
    chosen = command.RunChoice(
        tuple(state or ()), name, since, count, after, tuple(where or ()), sort
    )
    raise typer.Exit(command.list_runs(runs, chosen, chosen_columns, as_json=as_json))


def report(
    run: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids of runs, or `newest`.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the page. Default, for one run: RUN's `report`."),
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Write one page about a run: evaluations, curves, alarms, data, versions, and how to reproduce
    it. Several runs stand next to each other, with what differs between their specs.

    The page is Markdown, and HTML without other files. Secrets in the spec are left out. Works for
    running, finished and failed runs: what a run lacks, or what is damaged, is named.

    Reads the run's files, so run it on the launcher's machine; FLOTILLA_LAUNCHER has no effect.
    """
    from flotilla_launcher.cli import report as command

    raise typer.Exit(command.write_report(run, runs, out))


def logs(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")],
    service: Annotated[
        str, typer.Argument(help="env_gateway, learner or rollout; all when absent.")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow new lines until the run ends.")
    ] = False,
    lines: Annotated[
        int,
        typer.Option(
            "--lines", "-n", min=0, max=1_000_000, help="Number of last lines to print first."
        ),
    ] = 50,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line, as in a pipe.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Print the logs of a run's services.

    Uses the launcher that FLOTILLA_LAUNCHER names, as `submit` does, else the runs of `--runs`.
    """
    from flotilla_launcher.cli import logs as command

    raise typer.Exit(
        command.show_logs(run, service, runs, follow=follow, lines=lines, as_json=as_json)
    )


def show(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Only attempts that this step trained on.")
    ] = None,
    env: Annotated[str | None, typer.Option("--env", help="Only this environment.")] = None,
    group: Annotated[str | None, typer.Option("--group", help="Only this group.")] = None,
    passed: Annotated[
        bool, typer.Option("--passed", help="Only attempts with a reward of at least 1.")
    ] = False,
    failed: Annotated[bool, typer.Option("--failed", help="Only all others.")] = False,
    count: Annotated[int, typer.Option("-n", min=1, help="Maximum number of attempts.")] = 3,
    policy: Annotated[
        str | None,
        typer.Option("--policy", help="Model folder with the tokenizer; the run's own by default."),
    ] = None,
    whole: Annotated[
        bool,
        typer.Option("--whole", help="Show in full the tool results truncated for the policy."),
    ] = False,
    tasks: Annotated[
        bool, typer.Option("--tasks", help="Show the parked and quarantined tasks instead.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Show attempts of the agent: prompt, turns, observations, reward and checks.

    Attempts with their text come first, then the newest first. Checkpoints drop the text of trained
    attempts, except for the first group of each step.

    Reads the run's files, so run it on the launcher's machine; FLOTILLA_LAUNCHER has no effect.
    """
    from flotilla_launcher.cli import show as command

    if passed and failed:
        raise typer.BadParameter("--passed and --failed leave no attempt; pass one of them")
    if tasks:
        refuse_without_effect(context, "--tasks", besides=("run", "tasks", "runs"))
    outcome = passed if passed or failed else None
    chosen = command.AttemptFilter(step, env, group, outcome)
    raise typer.Exit(
        command.show_tasks(run, runs)
        if tasks
        else command.show_attempts(run, runs, chosen, count, policy, whole=whole)
    )


def inspect(
    context: typer.Context,
    run: Annotated[
        str | None, typer.Argument(help="Id of a run, or `newest`; all runs when absent.")
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on loopback; 0: any free port.")
    ] = 0,
    browse: Annotated[
        bool,
        typer.Option("--browser/--no-browser", help="Open the page in a browser on this machine."),
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option("--bundle", help="Write the pages to this zip file instead of serving them."),
    ] = None,
    step: Annotated[
        list[int] | None,
        typer.Option("--step", min=0, help="Step to bundle; repeatable. Default: the newest."),
    ] = None,
    policy: Annotated[
        Path | None,
        typer.Option("--policy", help="Model folder with the tokenizer; the run's own by default."),
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Show runs in a browser: curves, groups, episodes, and every token with its numbers.

    The page is served on loopback; its address includes a token that changes at each start. Works
    for running and finished runs, and an open page does not slow the learner. `--bundle` writes a
    file for a colleague, who needs neither Flotilla nor the run.

    With FLOTILLA_LAUNCHER set, it shows a run of that launcher (the newest if RUN is not given), by
    `ssh` where the run's files are: on the launcher's machine, or on a rented one. If that is gone,
    they come from the run's store. A run under `--runs` is read there.
    """
    from flotilla_launcher.cli import inspect as command

    if bundle is None and step:
        raise typer.BadParameter("--step requires --bundle")
    if bundle is None:
        options = command.PageOptions(port, browse, policy)
        raise typer.Exit(command.inspect_runs(run, runs, options))
    refuse_without_effect(context, "--bundle", besides=("run", "bundle", "step", "policy", "runs"))
    raise typer.Exit(command.write_bundle(run or "newest", runs, bundle, step or [], policy))


def analyze(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")],
    step: Annotated[
        int | None,
        typer.Option("--step", min=0, help="Evaluated version. Default: the newest evaluation."),
    ] = None,
    rules: Annotated[
        Path | None,
        typer.Option("--rules", help="Python file with a list RULES of classes of your own."),
    ] = None,
    judge: Annotated[
        str,
        typer.Option(
            "--judge",
            metavar="URL",
            help="Ask a model of this endpoint about attempts that no rule knows. It is sent their"
            " conversations.",
        ),
    ] = "",
    judge_model: Annotated[
        str, typer.Option("--judge-model", help="Model of --judge (default: its first).")
    ] = "",
    judge_key_env: Annotated[
        str, typer.Option("--judge-key-env", help="Variable with the key, sent if it is set.")
    ] = "OPENAI_API_KEY",
    judge_calls: Annotated[
        int, typer.Option("--judge-calls", min=1, help="Most attempts that --judge is asked about.")
    ] = 50,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, as in analysis/step_N.json.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Say why attempts of an evaluation fail, by class, and what else it tells.

    Also: behaviour by environment, before against after, the signal in training, saturated and
    impossible tasks, and passes that may have fooled their verifier. Writes Markdown, HTML and JSON
    to `runs/RUN_ID/analysis/`; a run does so by itself after each evaluation. The classes, and how
    to add your own, are in docs/evaluation.md.

    Reads the run's files, so run it on the launcher's machine; FLOTILLA_LAUNCHER has no effect.
    """
    from flotilla_launcher.cli import analyze as command

    if judge_model and not judge:
        raise typer.BadParameter("--judge-model requires --judge")
    asked = command.JudgeChoice(judge, judge_model, judge_key_env, judge_calls) if judge else None
    chosen = command.AnalysisChoice(step, rules, asked)
    raise typer.Exit(command.analyze(run, runs, chosen, as_json=as_json))


def export_trajectories(
    run: Annotated[str, typer.Argument(help="Id of a run, or `newest`.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to create; must not exist.")],
    form: Annotated[
        Literal["parquet", "datasets"],
        typer.Option("--format", help="One file with all numbers, or a folder for `load_dataset`."),
    ] = "parquet",
    env: Annotated[str | None, typer.Option("--env", help="Only this environment.")] = None,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Only attempts counted by this step.")
    ] = None,
    passed: Annotated[
        bool, typer.Option("--passed", help="Only attempts with a reward of at least 1.")
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Write the episodes of a run: conversations with tool calls, rewards, tokens.

    `datasets` is for supervised training elsewhere: `load_dataset(DIR)` has `messages` in its rows.
    Attempts with pruned tokens and no dump are omitted and counted.

    Reads the run's files, so run it on the launcher's machine; FLOTILLA_LAUNCHER has no effect.
    """
    from flotilla_launcher.cli import export_trajectories as command

    wanted = command.AttemptFilter(step, env, passed=passed or None)
    raise typer.Exit(command.export_trajectories(run, out, runs, form, wanted))

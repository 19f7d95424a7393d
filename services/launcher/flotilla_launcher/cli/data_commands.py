"""Commands for tasks: `flotilla data prepare`, `check`, `collect`, `play`, `show`, `stats` and
`diff`."""

from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flotilla_launcher.cli.options import OVERRIDES, RUNS, Runs, refuse_without_effect


def add_data_commands(app: typer.Typer) -> None:
    data = typer.Typer(
        name="data",
        no_args_is_help=True,
        help=(
            "Prepares tasks for training and evaluation, checks them on their environments,"
            " collects those that a policy can learn from, and shows what is in task files.\n\n"
            "Start with `flotilla data stats FILE`, then `flotilla data prepare FILE --out DIR`;"
            " a run spec names `DIR/train.jsonl` in `learner.tasks` and `DIR/eval.jsonl` in"
            " `learner.eval.sets`."
        ),
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, command in (
        ("prepare", data_prepare),
        ("show", data_show),
        ("stats", data_stats),
        ("diff", data_diff),
    ):
        data.command(name=name)(command)
    data.command(name="check", context_settings=OVERRIDES)(data_check)
    data.command(name="collect", context_settings=OVERRIDES)(data_collect)
    data.command(name="play", context_settings=OVERRIDES)(data_play)
    app.add_typer(data)


def parse_share(text: object) -> Fraction:
    """Parse a share of 1, exactly: 0.2 is a fifth."""
    try:
        share = Fraction(str(text))
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share <= 1:
        raise typer.BadParameter(f"{str(text)!r} is not a share from 0 to 1, such as 0.2")
    return share


def _split_list(values: Sequence[str] | None) -> tuple[str, ...]:
    """Return the items of an option that is repeated, or a list with commas."""
    items = [item.strip() for value in values or () for item in value.split(",")]
    return tuple(dict.fromkeys(item for item in items if item))


def data_prepare(
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to create, or to prepare again.")
    ],
    source: Annotated[
        str,
        typer.Argument(
            show_default=False,
            help=(
                "Task file, folder of Harbor tasks, URL of a store (s3://BUCKET/FILE),"
                " hf://datasets/OWNER/NAME[@REVISION][/FILE], or fleet:[ENV,...]."
            ),
        ),
    ] = "",
    data_version: Annotated[
        str,
        typer.Option(
            "--data-version",
            metavar="VERSION",
            help=(
                "SOURCE/VERSION/openenv/all_MODALITY.json, as Fleet keeps its tasks; SOURCE is"
                " S3_DATASET_BUCKET by default."
            ),
        ),
    ] = "",
    modality: Annotated[
        str, typer.Option("--modality", help="Only tasks of this modality, such as tool_use; all.")
    ] = "",
    env: Annotated[
        list[str] | None,
        typer.Option("--env", help="Only this environment; repeatable, or a list with commas."),
    ] = None,
    difficulty: Annotated[
        list[str] | None,
        typer.Option("--difficulty", help="Only this difficulty; as --env."),
    ] = None,
    default_env: Annotated[
        str,
        typer.Option(
            "--default-env",
            metavar="ENV",
            help="Environment of rows that name none: Harbor's, and some of TRL.",
        ),
    ] = "",
    max_tasks: Annotated[
        int | None, typer.Option("--max-tasks", min=1, help="At most so many tasks in all.")
    ] = None,
    held_out: Annotated[
        list[str] | None,
        typer.Option("--held-out", metavar="ENV", help="Only evaluate on it; as --env."),
    ] = None,
    eval_ratio: Annotated[
        Fraction,
        typer.Option(
            "--eval-ratio",
            parser=parse_share,
            metavar="SHARE",
            show_default="0.1",
            help="Share of each environment's tasks to evaluate on.",
        ),
    ] = Fraction(1, 10),
    eval_min: Annotated[
        int,
        typer.Option(
            "--eval-min", min=1, help="An environment that would have fewer is only trained on."
        ),
    ] = 5,
    eval_max: Annotated[
        int, typer.Option("--eval-max", min=0, help="Most tasks of an environment to evaluate on.")
    ] = 20,
    max_eval: Annotated[
        int | None,
        typer.Option("--max-eval", min=0, help="Most of all; environments share it evenly."),
    ] = None,
    max_env_share: Annotated[
        Fraction | None,
        typer.Option(
            "--max-env-share",
            parser=parse_share,
            metavar="SHARE",
            show_default=False,
            help="No environment has more of the tasks that are finally trained on.",
        ),
    ] = None,
    quarantine: Annotated[
        Path | None,
        typer.Option(
            "--quarantine",
            metavar="FILE",
            help="JSON lines of {key or pattern, reason, date, evidence}: tasks not to use.",
        ),
    ] = None,
    keep_split: Annotated[
        Path | None,
        typer.Option(
            "--keep-split",
            metavar="DIR",
            help="Prepared folder whose tasks stay trained on, or evaluated on, as they are there.",
        ),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="LINT",
            help="Keep tasks with this fault: relative_date, no_data_key; as --env.",
        ),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Refuse a source with faulty tasks instead of dropping them."
        ),
    ] = False,
    form: Annotated[
        Literal["jsonl", "json", "parquet"],
        typer.Option("--format", help="Format of the files written; no run reads parquet."),
    ] = "jsonl",
) -> None:
    """Split tasks into DIR/train.jsonl and DIR/eval.jsonl, and say what became of each.

    SOURCE has tasks of Fleet, as JSON, JSON lines or parquet, or rows of verl, SkyRL or TRL. Keys
    are read from AWS_ACCESS_KEY_ID or AWS_PROFILE, HF_TOKEN, and FLEET_API_KEY. The manifest has
    the version of what was fetched; a download that was interrupted goes on in the next call.

    Every task of SOURCE is trained on, evaluated on, or dropped for one reason; a table counts them
    by environment, and DIR/manifest.json lists them with their digests. Tasks that the env_gateway
    would refuse are dropped, and those with relative dates but no CURRENT_DATE, those whose
    verifier reads data that the task does not name, and those that are evaluated on under another
    key. Which task goes where depends on a hash of its key, not on the order of the file. Exit
    code: 0; 2 if nothing was written.
    """
    from flotilla_launcher.cli import data_prepare as command
    from flotilla_reading.data.conventions import Defaults
    from flotilla_reading.data.preparation import Wishes
    from flotilla_reading.data.selection import Selection
    from flotilla_reading.data.split import SplitRules

    modality = "" if modality == "all" else modality
    envs, levels, held, allowed = map(_split_list, (env, difficulty, held_out, allow))
    wishes = Wishes(
        Selection(modality, envs, levels, max_tasks),
        SplitRules(eval_ratio, eval_min, eval_max, max_eval, held),
        max_env_share,
        strict=strict,
        defaults=Defaults(default_env, modality),
    )
    options = command.PrepareOptions(
        *(source, data_version, out, quarantine, keep_split, allowed, form)
    )
    raise typer.Exit(command.prepare_data(options, wishes))


def data_check(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec; only its [env_gateway] is used.")],
    tasks: Annotated[Path, typer.Argument(help="Task file, or folder of `data prepare`.")],
    solutions: Annotated[
        Path | None,
        typer.Option(
            "--solutions",
            metavar="FILE",
            help="JSON lines of {key, calls, answer}: a recorded solution of each task.",
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Results; those in it are kept.")
    ] = Path("checks.jsonl"),
    key: Annotated[str | None, typer.Option("--key", help="Only the task with this key.")] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", help="Only this environment; repeatable, or a list with commas."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="So many tasks, from all environments.")
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Tasks that are checked concurrently.")
    ] = 8,
    again: Annotated[
        bool, typer.Option("--again", help="Also check tasks that have a result.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask before episodes that cost money.")
    ] = False,
) -> None:
    """Check on their real environments whether tasks can be trained on.

    A recorded solution must pass and use only tools that are offered; an untouched world must not
    pass, nor cheating answers in it; several grades of one state must agree; and the prompt must
    not give the answer away. Each task becomes valid, invalid, or an error or timeout, which are
    the environment's and tried again by the next run. With `learner.select.checked = true` and
    `learner.select.checks = "checks.jsonl"`, a run trains on the valid ones only.

    A gateway is started for it. Options such as `--env_gateway.backend=...` override the spec. Exit
    code: 0 all valid, 1 otherwise, 2 nothing could be checked.
    """
    from flotilla_launcher.cli import data_check as command

    options = command.CheckOptions(
        *(spec, tasks, solutions, out, key, _split_list(env), limit, concurrency),
        again=again,
        yes=yes,
    )
    raise typer.Exit(command.check_data(options, context.args))


def _teacher_option(help: str, **settings: Any) -> Any:
    return typer.Option(rich_help_panel="Teacher", help=help, **settings)


def _budget_option(help: str, **settings: Any) -> Any:
    return typer.Option(rich_help_panel="Budget of the teacher", help=help, **settings)


def data_collect(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec; only its [env_gateway] is used.")],
    tasks: Annotated[Path, typer.Argument(help="Task file: JSON or JSON lines.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder to create, or to go on with.")
    ],
    episodes: Annotated[
        list[str] | None,
        typer.Option(
            "--episodes",
            metavar="FILE|RUN",
            help="Recorded attempts: JSON lines of a dump or of `env try --out`, or all of a run;"
            " repeatable.",
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        _teacher_option(
            "An OpenAI-compatible endpoint, such as https://api.example.com/v1, or a folder or name"
            " of the hub, which vLLM serves here.",
            metavar="URL|MODEL",
        ),
    ] = None,
    teacher_model: Annotated[
        str, _teacher_option("Model of the endpoint (default: its first).")
    ] = "",
    key_env: Annotated[
        str, _teacher_option("Variable with the endpoint's key, sent if it is set.")
    ] = "OPENAI_API_KEY",
    tries: Annotated[int, _teacher_option("Tries at each task.", min=1)] = 4,
    max_turns: Annotated[int, _teacher_option("Turns of a try.", min=1)] = 50,
    turn_timeout: Annotated[
        float, _teacher_option("Seconds that one answer may take.", min=0.1)
    ] = 600.0,
    temperature: Annotated[
        float | None, _teacher_option("Default: the endpoint's own.", min=0.0, max=10.0)
    ] = None,
    vllm_args: Annotated[str, _teacher_option("Arguments of vLLM for MODEL.")] = "",
    requests_per_minute: Annotated[
        float | None, _teacher_option("The most requests a minute, evenly spaced.", min=0.01)
    ] = None,
    max_calls: Annotated[
        int | None, _budget_option("The most requests, retries included.", min=1)
    ] = None,
    max_tokens: Annotated[
        int | None, _budget_option("The most tokens of prompts and answers.", min=1)
    ] = None,
    max_cost: Annotated[
        float | None, _budget_option("The most money, by the prices given.", min=0.0)
    ] = None,
    price_in: Annotated[
        float, _budget_option("Price of a million tokens of prompts.", min=0.0)
    ] = 0.0,
    price_out: Annotated[
        float, _budget_option("Price of a million tokens of answers.", min=0.0)
    ] = 0.0,
    min_graded: Annotated[
        int, typer.Option("--min-graded", min=1, help="Graded tries that judge a task.")
    ] = 2,
    min_pass_rate: Annotated[
        Fraction,
        typer.Option(
            "--min-pass-rate",
            parser=parse_share,
            metavar="SHARE",
            show_default="0",
            help="Drop tasks of which fewer graded tries pass; those that none passes always.",
        ),
    ] = Fraction(0),
    max_pass_rate: Annotated[
        Fraction,
        typer.Option(
            "--max-pass-rate",
            parser=parse_share,
            metavar="SHARE",
            show_default="0.9",
            help="Drop tasks of which more graded tries pass; 1: none.",
        ),
    ] = Fraction(9, 10),
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Concurrent tries and replays.")
    ] = 8,
    retry_ungraded: Annotated[
        bool,
        typer.Option(
            "--retry-ungraded",
            help="Make tries and replays of earlier runs that had no grade once more.",
        ),
    ] = False,
    runs: Runs = RUNS,
) -> None:
    """Keep the tasks that are solvable and not trivial, with solutions and demonstrations.

    A teacher tries each task several times, or recorded episodes are its tries. A task is kept if
    the share of graded tries that passed is within bounds, and if the calls of one that passed,
    made again on a fresh instance, pass again. DIR gets tasks.jsonl, solutions.jsonl,
    demonstrations.jsonl for imitation, evidence.jsonl about every task, and manifest.json.

    Each request to the teacher is in DIR/ledger.sqlite before it is sent, and its answer after: run
    the command again to go on after a budget, Ctrl-C or a crash; nothing that was answered is asked
    again. Budgets are those of DIR, over all runs. Options such as `--env_gateway.backend=...`
    override the spec. Exit code: 0 all tasks are decided, 1 some are not, 2 nothing was begun.
    """
    from flotilla_launcher.cli import data_collect as command

    if teacher is None:
        if not episodes:
            raise typer.BadParameter("--teacher, --episodes or both are needed")
        shared = ("spec", "tasks", "out", "episodes", "min_graded", "min_pass_rate")
        rest = ("max_pass_rate", "concurrency", "retry_ungraded", "runs")
        refuse_without_effect(context, "no --teacher", besides=(*shared, *rest))
        wish = None
    else:
        chosen = command.ChosenModel(teacher, teacher_model, key_env, temperature, vllm_args)
        limits = command.Limits(max_calls, max_tokens, max_cost)
        prices = command.Prices(price_in, price_out)
        wish = command.TeacherWish(
            *(chosen, tries, max_turns, turn_timeout, requests_per_minute, limits, prices)
        )
    sources = command.Sources(spec, context.args, tasks, tuple(episodes or ()), runs)
    rules = command.Rules(min_graded, min_pass_rate, max_pass_rate)
    options = command.CollectOptions(sources, out, rules, concurrency, retry=retry_ungraded)
    raise typer.Exit(command.collect_tasks(options, wish))


def data_play(
    context: typer.Context,
    spec: Annotated[Path, typer.Argument(help="Run spec; only its [env_gateway] is used.")],
    tasks: Annotated[Path, typer.Argument(help="Task file.")],
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="JSON lines file to create, or to add to.")
    ],
    key: Annotated[str, typer.Option("--key", help="Play only this task.")] = "",
) -> None:
    """Play tasks by hand, and keep what passes as demonstrations.

    Of each task the prompt and the tools are shown. A line is a call of a tool, a name with a JSON
    object or with words NAME=VALUE, whose answer is shown; `/done TEXT` ends the task with a final
    answer, and has it graded. What earns reward 1 is added to FILE, which `flotilla sft SPEC --from
    FILE` reads; calls that reached no tool are left out. Tasks that FILE has are not played again.

    Options such as `--env_gateway.backend=...` override the spec. Exit code: 0; 1 if an environment
    does not open; 2 for a bad spec; 130 after Ctrl-C.
    """
    from flotilla_launcher.cli import data_play as command

    wish = command.HandPlay(spec, context.args, tasks, key, out)
    raise typer.Exit(command.play_tasks(wish))


Tasks = Annotated[Path, typer.Argument(help="Task file, or folder of `data prepare`.")]
Count = Annotated[
    int, typer.Option("--count", "-n", min=0, help="Most tasks to print of a kind; 0: all.")
]


def data_show(
    tasks: Tasks,
    key: Annotated[str | None, typer.Argument(help="Key of one task, to see all of it.")] = None,
    count: Count = 20,
) -> None:
    """List the tasks of a file or folder, or show one."""
    from flotilla_launcher.cli import data_views as command

    raise typer.Exit(command.show_tasks(tasks, key, count))


def data_stats(tasks: Tasks) -> None:
    """Count tasks by environment, with modalities, versions, verifiers and length of prompts."""
    from flotilla_launcher.cli import data_views as command

    raise typer.Exit(command.show_statistics(tasks))


def data_diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="Task file, or folder.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Task file, or folder.")],
    count: Count = 20,
) -> None:
    """Show which tasks B adds (+), lacks (-), changes (~), and moves to another part (>).

    Tasks are compared by key and digest, in whichever vocabulary, format and order they are.
    """
    from flotilla_launcher.cli import data_views as command

    raise typer.Exit(command.show_difference(first, second, count))

"""Command line: `flotilla tiny build`, `fit` and `evaluate`."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

DESCRIPTION = """\
Make the demo's policy from scratch: a Qwen3 of 0.2 million parameters with its own tokenizer.

`build` trains it for about a minute on the episodes of a lazy demonstrator. It knows the tools, but
mostly claims to be done before it changes anything; in the course `arithmetic` it can add, but
mostly answers before it has finished. The policy learns the format, gives up when it acts
greedily, and solves about a fifth of the tasks when it samples: the rest is left to reinforcement
learning. `evaluate` measures it.

The course `screen` makes a Qwen3-VL of 0.4 million parameters, whose demonstrator sees coloured
tiles and mostly clicks any of them."""

EXAMPLES = """\
examples:
  flotilla tiny build --seed 0 --out build/tiny-0
  flotilla tiny build --course arithmetic --out build/tiny-numbers-0
  flotilla tiny build --course screen --out build/tiny-screen-0
  flotilla tiny fit --demonstrations demonstrations.jsonl \\
      --tasks tasks/train.jsonl tasks/heldout.jsonl --out tiny
  flotilla tiny evaluate --model build/tiny-0"""


def build_parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(
        prog="flotilla tiny",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = root.add_subparsers(dest="command", required=True)
    build = commands.add_parser(
        "build",
        help="make the policy folder unless it is up to date",
        description="Make a Hugging Face folder that transformers and vLLM load. The same seed "
        "gives the same bits on the same machine.",
    )
    build.add_argument("--seed", type=_parse_natural, default=0, help="from 0; default %(default)s")
    build.add_argument("--out", type=Path, required=True, help="the folder, such as build/tiny-0")
    fit = commands.add_parser(
        "fit",
        help="make a policy folder for one's own tools",
        description="Make such a folder from demonstrations, as `flotilla init` writes them: the "
        "policy knows tools and words, copies values it has never seen, and gives up early.",
    )
    fit.add_argument("--demonstrations", type=Path, required=True, help="conversations with tools")
    fit.add_argument(
        "--tasks", type=Path, nargs="+", required=True, help="task files whose words it knows"
    )
    fit.add_argument("--seed", type=_parse_natural, default=0, help="from 0; default %(default)s")
    fit.add_argument("--out", type=Path, required=True, help="the folder")
    evaluate = commands.add_parser(
        "evaluate",
        help="measure pass@1 of a policy folder, sampled and greedy",
        description="Play tasks that neither demonstrations nor training contain, without an "
        "engine or a service.",
    )
    evaluate.add_argument("--model", type=Path, required=True, help="a policy folder")
    evaluate.add_argument(
        "--tasks", type=_parse_positive, default=64, help="per environment; default %(default)s"
    )
    evaluate.add_argument(
        "--seed", type=_parse_natural, default=0, help="seed of the sampling; default 0"
    )
    for command, courses in (
        (build, ("tools", "arithmetic", "screen")),
        (evaluate, ("tools", "arithmetic")),
    ):
        command.add_argument(
            "--course",
            choices=courses,
            default="tools",
            help="course of the policy; default %(default)s",
        )
    return root


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 2 on failure, 130 if interrupted."""
    options = build_parser().parse_args(arguments)
    console = Console(stderr=True)
    try:
        if options.command == "build":
            return _build_policy(options.out, options.course, options.seed, console)
        if options.command == "fit":
            return _fit_policy(options, console)
        return _evaluate_policy(options.model, options.course, options.tasks, options.seed, console)
    except KeyboardInterrupt:
        console.print("interrupted: nothing was written")
        return 128 + signal.SIGINT


def _build_policy(out: Path, course: str, seed: int, console: Console) -> int:
    from flotilla_environments.tiny_policy.build import BuildError, build, recipe_for

    with _shown_progress(console) as show_progress:
        try:
            fresh = build(out, recipe_for(course, seed), show_progress)
        except BuildError as error:
            console.print(f"error: {error}", markup=False)
            return 2
    console.print(f"{out}: {'built' if fresh else 'up to date'}", markup=False)
    return 0


def _fit_policy(options: argparse.Namespace, console: Console) -> int:
    from flotilla_common.tasks.task_files import TaskFileError
    from flotilla_environments.tiny_policy.build import BuildError
    from flotilla_environments.tiny_policy.own_tools import build_for_tools, recipe_for_tools
    from flotilla_reading.demonstrations.conversation_files import ConversationFileError

    out, recipe = options.out, recipe_for_tools(options.seed)
    with _shown_progress(console) as show_progress:
        try:
            fresh = build_for_tools(
                out, options.demonstrations, options.tasks, recipe, show_progress
            )
        except (BuildError, ConversationFileError, TaskFileError, ValueError) as error:
            console.print(f"error: {error}", markup=False)
            return 2
    console.print(f"{out}: {'built' if fresh else 'up to date'}", markup=False)
    return 0


@contextmanager
def _shown_progress(console: Console) -> Generator[Callable[[str, int, int], None]]:
    """Show the stages of a build: bars on a terminal; elsewhere, as in a pipe to `flotilla train`,
    a line for each tenth of a stage."""
    if not console.is_terminal:
        tenths: dict[str, int] = {}

        def print_tenth(stage: str, done: int, total: int) -> None:
            tenth = 10 * done // total
            if tenths.get(stage) != tenth:
                tenths[stage] = tenth
                console.print(f"{stage} {done:,} of {total:,}", markup=False, highlight=False)

        yield print_tenth
        return
    columns = (TextColumn("{task.description:15}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        stages: dict[str, TaskID] = {}

        def draw_bar(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done)

        yield draw_bar


def _evaluate_policy(folder: Path, course: str, tasks: int, seed: int, console: Console) -> int:
    if not (folder / "config.json").is_file():
        console.print(f"error: {folder} is not a policy folder: build one first", markup=False)
        return 2
    from flotilla_environments.tiny_policy.evaluate import load_player, measure_policy

    player = load_player(folder)
    table = Table("tasks", "temperature", "environment", "pass@1", "95 % interval")
    for row in measure_policy(player, course, tasks, seed):
        low, high = row.score.interval
        interval = f"{low:.1%} to {high:.1%}"
        score = f"{row.score.pass_at_1:.1%}"
        table.add_row(row.split, f"{row.temperature:g}", row.environment, score, interval)
    Console().print(table)
    return 0


def _parse_positive(text: str) -> int:
    value = _parse_natural(text)
    if value == 0:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _parse_natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


if __name__ == "__main__":
    # SIGTERM acts as Ctrl-C, so that an incomplete folder is removed.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Never search for a model on the network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    sys.exit(main())

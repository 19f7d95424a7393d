"""What `flotilla eval` shows: scores by environment, and two evaluations compared."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from flotilla_common.text.printable_text import print_json
from flotilla_launcher.cli.command_runner import FAILED, OK, report_error
from flotilla_launcher.cli.terminal import CommandError, Terminal, make_table, print_table
from flotilla_reading.evaluation.evaluated_attempts import EvaluatedAttempt, rewards_by_task
from flotilla_reading.evaluation.scores import EnvironmentScore, Rate, score_evaluation
from flotilla_reading.plots.curve_plot import Panel, PlotLine, draw_panels
from flotilla_reading.statistics.paired import PairedComparison, compare_paired

# Differences for which the number of tasks that show them is printed.
_DIFFERENCES = (0.02, 0.05, 0.1)
# Between the points of two evaluations, of the distance between environments.
_BESIDE = 0.1


@dataclass(frozen=True, slots=True)
class ShownComparison:
    """A comparison with the names of both, and how many tasks show differences of these sizes."""

    name: str
    against: str
    result: PairedComparison
    tasks_to_show: Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class NamedAttempts:
    """An evaluation as it is shown; `k` is that of pass@k, and `digests` those of its tasks by key,
    as far as they are known. One that failed has no attempts here, but the reason as `failed`."""

    name: str
    attempts: Sequence[EvaluatedAttempt]
    digests: Mapping[str, str]
    k: int
    failed: str = ""

    def score(self) -> list[EnvironmentScore]:
        return [] if self.failed else score_evaluation(self.attempts, self.k)


def show_evaluations(
    shown: Sequence[NamedAttempts], against: NamedAttempts | None, *, as_json: bool
) -> int:
    """Print the scores of evaluations, and the last one compared with another, as tables or as one
    JSON object; return the exit code. What cannot be compared is no reason to keep scores back."""
    found, problem = None, ""
    try:
        found = against and _compare(against, shown[-1])
    except CommandError as error:
        problem = str(error)
    if as_json:
        told = [{"name": e.name, "scores": e.score(), "failed": e.failed} for e in shown]
        whole = {"evaluations": told, "comparison": found, "not_compared": problem}
        print_json(msgspec.to_builtins(whole))
        return FAILED if problem else OK
    console = Terminal(soft_wrap=True)
    for each in [*filter(None, [against]), *shown]:
        _print_scores(each, console)
    if found is not None:
        _print_comparison(found, console)
    return report_error(problem) if problem else OK


def draw_scores(out: Path, shown: Sequence[NamedAttempts]) -> None:
    """Draw pass@1 of each environment with its interval, evaluations next to one another."""
    scored = [(each.name, {score.env_key: score for score in each.score()}) for each in shown]
    names = list(dict.fromkeys(env for _, scores in scored for env in scores))
    lines: list[PlotLine] = []
    for number, (name, scores) in enumerate(scored):
        rates = {env: score.pass_at_1 for env, score in scores.items() if score.pass_at_1}
        beside = _BESIDE * (number - (len(scored) - 1) / 2)
        lines.append(
            PlotLine(
                label=name,
                steps=[names.index(env) + beside for env in rates],
                values=[rate.mean for rate in rates.values()],
                style="o",
                low=[rate.low for rate in rates.values()],
                high=[rate.high for rate in rates.values()],
            )
        )
    draw_panels(out, [Panel("pass@1", lines, is_share=True, names=names)])


def find_common(
    first: NamedAttempts, second: NamedAttempts, keys: Collection[str]
) -> Collection[str]:
    """Return the tasks of the first evaluation that are among these keys of the second. Raises
    CommandError if there is none, or tasks of one key differ."""
    if not any(attempt.reward is not None for attempt in first.attempts):
        raise CommandError(f"{first.name} has no attempt with a grade")
    fix = "evaluate both on the same --tasks"
    if not (common := {each.task_key for each in first.attempts}.intersection(keys)):
        raise CommandError(f"{first.name} and {second.name} have no task in common: {fix}")
    kept, now = first.digests, second.digests
    known_twice = common & kept.keys() & now.keys()
    if changed := sorted(key for key in known_twice if kept[key] != now[key]):
        raise CommandError(
            f"{first.name} and {second.name}: {len(changed)} tasks of the same key differ, such as"
            f" {changed[0]}: {fix}"
        )
    return common


def _compare(first: NamedAttempts, second: NamedAttempts) -> ShownComparison:
    if second.failed:
        raise CommandError(f"{second.name} failed, so it is not compared with {first.name}")
    if not any(attempt.reward is not None for attempt in second.attempts):
        raise CommandError(f"{second.name} has no attempt with a grade")
    known, new = rewards_by_task(first.attempts), rewards_by_task(second.attempts)
    find_common(first, second, new)
    try:
        found = compare_paired(known, new)
    except ValueError as error:
        raise CommandError(f"{first.name} and {second.name}: {error}") from error
    needed = {f"{each:g}": found.tasks_to_show(each) for each in _DIFFERENCES}
    return ShownComparison(second.name, first.name, found, needed)


def _print_scores(shown: NamedAttempts, console: Terminal) -> None:
    """Print a line for each environment, and one for all tasks."""
    console.print(shown.name)
    if shown.failed:
        console.print(f"failed: {shown.failed}")
        return
    k = shown.k
    more = (f"pass@{k}", f"pass^{k}") if k > 1 else ()
    headings = ("environment", "tasks", "attempts", "graded", "no grade")
    table = make_table((*headings, "pass@1", "95 % interval", *more))
    for score in shown.score():
        first = score.pass_at_1
        interval = f"{first.low:.3f} to {first.high:.3f}" if first else "-"
        rates = (score.pass_at_k, score.pass_power_k) if k > 1 else ()
        counts = map(str, (score.tasks, score.attempts, score.graded, score.ungraded))
        table.add_row(score.env_key, *counts, _cell(first), interval, *map(_cell, rates))
    print_table(table, console)


def _print_comparison(shown: ShownComparison, console: Terminal) -> None:
    found = shown.result
    console.print(f"{shown.name} against {shown.against}, common tasks: {found.tasks}")
    console.print(
        f"difference of the mean reward {found.difference:+.3f}, 95 % interval {found.low:+.3f} to"
        f" {found.high:+.3f}"
    )
    console.print(
        f"tasks won {found.won}, lost {found.lost}, tied {found.tied}; p = {found.p:.2g}"
        " (two-sided, by changes of signs)"
    )
    if told := [f"{each}: {tasks}" for each, tasks in shown.tasks_to_show.items() if tasks]:
        console.print(f"tasks that show a difference in 4 of 5 cases: {', '.join(told)}")


def _cell(rate: Rate | None) -> str:
    return "-" if rate is None else f"{rate.mean:.3f}"

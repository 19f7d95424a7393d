"""The sections of an analysis, for a page of any form: pure, from the values of `run_analysis`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

from flotilla_reading.analysis.pictures import draw_bars, draw_lines
from flotilla_reading.analysis.run_analysis import LEAST_SIGNAL

Values = Mapping[str, Any]


class Link(NamedTuple):
    """A text that leads to a page of the inspector."""

    text: str
    href: str


Cell = str | Sequence[Link]
_SHOWN_TASKS = 10
# Columns of the behaviour in an environment.
_SHARES = {
    "repeated_calls": "repeated calls",
    "tool_errors": "tool errors",
    "thinking_share": "thinking",
    "context_use_mean": "context use",
    "context_use_max": "most context",
}


@dataclass(frozen=True, slots=True)
class Section:
    """A title, a paragraph, a picture (SVG), a table and a listing, which keeps its lines; each but
    the title may be missing. Its texts are untrusted, the picture is not. Markdown shows the file
    of the picture instead, if it has one."""

    title: str
    text: str = ""
    headings: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    picture: str = ""
    picture_file: str = ""
    listing: str = ""


def make_sections(analysis: Values) -> list[Section]:
    """Return the sections of an analysis, in the order of reading."""
    return [
        _before_after(analysis),
        _failures(analysis),
        _behaviour(analysis),
        _learning(analysis),
        _tasks(analysis),
        _suspects(analysis),
    ]


def _before_after(analysis: Values) -> Section:
    rows = tuple(
        (
            each["set"],
            each["env_key"],
            _with_interval(each["before"]),
            _with_interval(after),
            _difference(each["difference"]),
            f"{percent(after['pass_at_k'])} (k = {after['k']})",
            number(after["variance_per_prompt"]),
            str(after["tasks"]),
            str(after["ungraded"]),
        )
        for each in analysis["before_after"]
        for after in (each["after"],)
    )
    first, step = analysis["first_step"], analysis["step"]
    text = (
        f"pass@1 of version {step} and of the first evaluation (version {first}), with 95 %"
        " intervals over tasks; the difference, in points, is of tasks that both graded."
    )
    headings = ("set", "environment", "before", "after", "difference", "pass@k")
    more = ("variance per prompt", "tasks", "ungraded attempts")
    return Section("Before and after", text, (*headings, *more), rows)


def _with_interval(figures: Values) -> str:
    if figures["interval"] is None:
        return "-"
    low, high = figures["interval"]
    return f"{percent(figures['pass_at_1'])} [{percent(low)}, {percent(high)}]"


def _difference(paired: Values | None) -> str:
    if paired is None:
        return "-"
    points = [f"{100 * paired[name]:+.1f}" for name in ("difference", "low", "high")]
    return f"{points[0]} [{points[1]}, {points[2]}], {paired['won']} won, {paired['lost']} lost"


def _failures(analysis: Values) -> Section:
    found, run_id = analysis["failures"], analysis["run_id"]
    before = analysis["failures_before"]
    rows = tuple(
        (
            each["name"],
            str(each["count"])
            + (f" ({each['judged']} judged by a model)" if each["judged"] else ""),
            percent(each["share"]),
            str(before.get(each["name"], 0)),
            str(each["also"]),
            [_link(run_id, example) for example in each["examples"]],
            each["description"],
        )
        for each in found
    )
    text = (
        "Each failed attempt counts once, by its main class (docs/evaluation.md). Also: those"
        " that have the class next to another main one."
    )
    headings = ("class", "attempts", "share", "first evaluation", "also", "examples", "meaning")
    bars = draw_bars("Failed attempts by class", [(each["name"], each["count"]) for each in found])
    return Section("Why attempts fail", text, headings, rows, bars if found else "")


def _behaviour(analysis: Values) -> Section:
    rows = tuple(
        (
            env,
            str(each["attempts"]),
            str(each["ungraded"]),
            number(each["avg_turns"]),
            number(each["avg_tool_calls"]),
            *(percent(each[name]) for name in _SHARES),
        )
        for env, each in analysis["environments"].items()
    )
    window = analysis["context_window"]
    known = f" of {window:,} tokens" if window else ", whose size spec.json does not tell"
    text = (
        "Repeated calls and tool errors are shares of the calls, thinking is one of the policy's"
        f" tokens, and context use, mean and most, one of the window{known}."
    )
    headings = ("environment", "attempts", "ungraded", "turns", "tool calls")
    return Section("Behaviour", text, (*headings, *_SHARES.values()), rows)


def _learning(analysis: Values) -> Section:
    rows = tuple(
        (
            env,
            str(each["steps"]),
            percent(each["steps_with_signal"]),
            percent(each["signal_ratio"]),
            f"{each['variance_per_prompt']:.4f}",
            percent(each["pass_at_1"]),
            each["verdict"] or "fine",
        )
        for env, each in analysis["learning"].items()
    )
    text = (
        "Only groups whose attempts differ in reward teach anything. Tasks of which fewer than"
        f" {LEAST_SIGNAL:.0%} of the groups do are too hard or too easy."
    )
    headings = ("environment", "steps", "steps with signal", "groups with signal")
    headings = (*headings, "variance per prompt", "pass@1 in training", "verdict")
    lines = {env: each["curve"] for env, each in analysis["learning"].items()}
    return Section(
        "Signal in training", text, headings, rows, draw_lines("Signal", lines) if lines else ""
    )


def _tasks(analysis: Values) -> Section:
    tasks = analysis["tasks"]
    rows = tuple(
        (name, str(tasks[f"{name}_count"]), ", ".join(tasks[name][:_SHOWN_TASKS]))
        for name in ("saturated", "impossible")
    )
    standing = ", ".join(f"{count:,} {name}" for name, count in tasks["standing"].items())
    text = f"Of {tasks['judged']:,} evaluated tasks with two graded attempts or more."
    text += f" The curriculum holds {standing} training tasks." if standing else ""
    return Section("Saturated and impossible tasks", text, ("kind", "tasks", "first of them"), rows)


def _suspects(analysis: Values) -> Section:
    rows = tuple(
        (
            str(each["score"]),
            [_link(analysis["run_id"], each)],
            each["task_key"],
            "; ".join(each["signs"]),
        )
        for each in analysis["suspects"]
    )
    text = "Passed attempts that a person should read, the oddest first. None of this is an alarm."
    if not rows:
        return Section("Suspects of reward hacking", "No passed attempt looks odd.")
    return Section("Suspects of reward hacking", text, ("score", "attempt", "task", "why"), rows)


def _link(run_id: str, example: Values) -> Link:
    group, index = example["group_id"], example["attempt_index"]
    parts = ("runs", run_id, "attempts", group, str(index), str(example["attempt_try"]))
    return Link(f"{group}/{index}", "/" + "/".join(quote(part, safe="") for part in parts))


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

"""Report at the end of `flotilla train`: the before/after table, the curve, and the files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from flotilla_common.files.durable_files import replace_file
from flotilla_common.run_folder.dump_files import ANALYSES
from flotilla_common.run_folder.metric_lines import METRICS_FILE
from flotilla_launcher.cli.command_hints import format_command
from flotilla_launcher.cli.progress_view import HELD_OUT, TRAINING
from flotilla_launcher.cli.terminal import Terminal
from flotilla_reading.metric_series import MetricSeries
from flotilla_reading.plots.curve_plot import Panel, PlotLine, draw_panels

SUMMARY_FILE = "summary.json"
CURVE_FILE = "curve.svg"
# The learner's, once it is done.
MODEL_FOLDER = "model"
ALARMS_FILE = "alarms.jsonl"


def read_summary(run_dir: Path) -> dict[str, Any] | None:
    """Read the learner's summary; None if it has written none."""
    path = run_dir / SUMMARY_FILE
    return json.loads(path.read_text()) if path.exists() else None


def add_total_seconds(run_dir: Path, total: float) -> None:
    """Write the total duration, as the user saw it, into the summary."""
    summary = read_summary(run_dir)
    if summary is None:
        return
    summary.setdefault("seconds", {})["total"] = round(total, 1)
    text = json.dumps(summary, indent=2) + "\n"
    replace_file(run_dir / SUMMARY_FILE, text.encode())


def make_eval_table(summary: dict[str, Any], moments: Sequence[str] = ("before", "after")) -> Table:
    """Build the table of a run's evaluations, line by line."""
    drawn = Table(title="Held-out tasks, share passed")
    drawn.add_column("")
    for moment in moments:
        drawn.add_column(moment.replace("_", " "), justify="right")
    figures = [summary["eval"].get(moment) or {} for moment in moments]
    drawn.add_row("pass@1 at T = 1", *(_format_with_interval(each) for each in figures))
    for env in sorted({env for each in figures for env in each.get("by_env", {})}):
        values = (_format_percent(_pass_rate(each.get("by_env", {}).get(env))) for each in figures)
        drawn.add_row(f"  {env}", *values)
    drawn.add_row("greedy", *(_format_percent(each.get("greedy_pass_at_1")) for each in figures))
    if any(each.get("unseen_names") is not None for each in figures):
        values = (_format_percent(_pass_rate(each.get("unseen_names"))) for each in figures)
        drawn.add_row("names RL never saw", *values)
    return drawn


def _pass_rate(value: Any) -> float | None:
    """Return a pass rate, which is a number or a key of a table."""
    return value.get("pass_at_1") if isinstance(value, dict) else value


def _format_percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _format_with_interval(figures: dict[str, Any]) -> str:
    text, interval = _format_percent(figures.get("pass_at_1")), figures.get("ci95")
    if not interval:
        return text
    low, high = interval
    return f"{text} [{low:.1%}, {high:.1%}]"


def draw_curve(run_dir: Path) -> None:
    """Draw pass@1 over steps, and the losses of a run that imitates, into the run's folder, if
    there is anything to draw."""
    metrics = MetricSeries(run_dir / METRICS_FILE)
    lines = [
        PlotLine("training tasks", *metrics.curve(TRAINING)),
        PlotLine("held-out tasks", *metrics.curve(HELD_OUT), style="o-"),
    ]
    losses = [
        PlotLine("demonstrations", *metrics.curve("sft/loss")),
        PlotLine("held-out demonstrations", *metrics.curve("sft/heldout_loss"), style="o-"),
    ]
    panels = [Panel("pass@1", lines, run_dir.name, is_share=True), Panel("loss", losses)]
    draw_panels(run_dir / CURVE_FILE, panels)


def print_report(run_dir: Path, console: Terminal, *, evaluated: bool = False) -> None:
    """Print the evaluation table, if there is one, and the files. `evaluated`: the run only
    evaluated, without training."""
    if not run_dir.exists():
        text = (
            f"The files of run {run_dir.name} are where its launcher runs, in runs/{run_dir.name}"
        )
        console.print(text, soft_wrap=True)
        return
    summary = read_summary(run_dir)
    if summary is not None and summary.get("eval"):
        console.print(
            make_eval_table(summary, ("eval_only",) if evaluated else ("before", "after"))
        )
    draw_curve(run_dir)
    files = {
        SUMMARY_FILE: "before and after, as numbers",
        CURVE_FILE: "learning curve",
        f"{ANALYSES}/newest.html": "why attempts of the newest evaluation fail",
        MODEL_FOLDER: "the trained model, for transformers and vLLM",
        METRICS_FILE: "every metric of every step",
        ALARMS_FILE: "alarms, each with its cause and what to try",
        "logs": "what each service wrote",
        "spec.json": "the run spec",
    }
    for name, meaning in files.items():
        if (run_dir / name).exists():
            console.print(f"{run_dir / name}  {meaning}", soft_wrap=True)
    look = format_command("inspect", run_dir.name, runs=run_dir.parent)
    console.print(f"\nTo see what the agent did, in a browser:\n  {look}", soft_wrap=True)

"""Learning curve of a run as a picture; run as a program with RUN_DIR."""

import json
import sys
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
CURVE_FILE = "curve.svg"


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Read the learner's metrics, one record per step; a truncated line is left out."""
    records: list[dict[str, Any]] = []
    for line in (run_dir / METRICS_FILE).read_text().splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def metric_series(records: list[dict[str, Any]], metric: str) -> tuple[list[int], list[float]]:
    """Return steps and values of one metric; the last value of a repeated step (after a resume)
    counts."""
    logged = [r for r in records if "step" in r and r.get(metric) is not None]
    values = {int(r["step"]): float(r[metric]) for r in logged}
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def draw_curve(run_dir: Path) -> None:
    """Draw pass@1 over steps into the run's folder, if there is anything to draw."""
    lines = _read_pass_rates(run_dir)
    if not any(steps for steps, _ in lines.values()):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for (label, (steps, values)), style in zip(lines.items(), ("-", "o-"), strict=True):
        axes.plot(steps, values, style, label=label)
    axes.set(xlabel="optimizer step", ylabel="pass@1", ylim=(0, 1), title=run_dir.name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(run_dir / CURVE_FILE)


def _read_pass_rates(run_dir: Path) -> dict[str, tuple[list[int], list[float]]]:
    records = read_metrics(run_dir)
    return {
        "training tasks": metric_series(records, "reward/avg_pass_at_1"),
        "held-out tasks": metric_series(records, "eval/all/pass_at_1"),
    }


if __name__ == "__main__":
    draw_curve(Path(sys.argv[1]))

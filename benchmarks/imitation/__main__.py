"""Imitation, GRPO and both, on the tiny policy: `python -m benchmarks.imitation`.

The plan is in docs/imitation.md. Everything runs on this machine, one run after another, with the
learner's losses but without its services. `--out` keeps the results, so that a second call resumes.

Prints the table of docs/imitation.md, draws the curves of runs that sampled beside the results, and
prints as its last line one JSON object with its rows: the share of held-out tasks solved, in
percent, of each seed, their mean, and its 95 % interval (Student's t over seeds).
"""

import argparse
import json
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.algorithms.table import mean_interval
from benchmarks.imitation.on_policy import Curve, Point, draw_curves
from benchmarks.imitation.skill import ARMS, HELDOUT_TASKS, Arm, run_arm, start_recipe
from flotilla_environments.tiny_policy.build import build


def main() -> None:
    given = _parse_arguments()
    done = _read_results(given.out)
    chosen = [arm for arm in ARMS if given.only in arm.name]
    folder = Path("build/tiny-orderless")
    build(folder, start_recipe())
    for seed in given.seeds:
        for arm in chosen:
            if (arm.name, seed) not in done:
                entry = {"arm": arm.name, "seed": seed, **asdict(run_arm(arm, seed, folder))}
                done[arm.name, seed] = entry
                with given.out.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
    draw_curves(
        given.out.with_suffix(".svg"), _list_curves(chosen, done, given.seeds), HELDOUT_TASKS
    )
    rows = [_make_row(arm, [done[arm.name, seed] for seed in given.seeds]) for arm in chosen]
    print("| | steps | at T = 1, mean [95 % interval] | seeds | greedy, seeds |")
    print("|---|---|---|---|---|")
    print("\n".join(map(_format_row, rows)))
    print(json.dumps({"tasks": HELDOUT_TASKS, "seeds": given.seeds, "rows": rows}))


def _read_results(path: Path) -> dict[tuple[str, int], dict[str, Any]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    return {(row["arm"], row["seed"]): row for row in map(json.loads, lines)}


def _list_curves(
    arms: list[Arm], results: dict[tuple[str, int], dict[str, Any]], seeds: list[int]
) -> dict[str, list[Curve]]:
    return {
        arm.name: [[Point(*point) for point in results[arm.name, seed]["curve"]] for seed in seeds]
        for arm in arms
        if arm.sampled
    }


def _make_row(arm: Arm, results: list[dict[str, Any]]) -> dict[str, Any]:
    sampled = [100 * result["curve"][-1][1] / HELDOUT_TASKS for result in results]
    greedy = [100 * result["greedy"] / HELDOUT_TASKS for result in results]
    return {
        "name": arm.name,
        "imitated": arm.imitated,
        "sampled": arm.sampled,
        "shown": [result["shown"] for result in results],
        "seeds": [round(share, 1) for share in sampled],
        "mean": round(statistics.mean(sampled), 1),
        "interval": [round(bound, 1) for bound in mean_interval(sampled)],
        "greedy": [round(share, 1) for share in greedy],
    }


def _format_row(row: dict[str, Any]) -> str:
    low, high = row["interval"]
    seeds, greedy = (", ".join(map(str, row[key])) for key in ("seeds", "greedy"))
    steps = f"{row['imitated']} + {row['sampled']}"
    return f"| {row['name']} | {steps} | {row['mean']} % [{low}, {high}] | {seeds} | {greedy} |"


def _parse_arguments() -> argparse.Namespace:
    text = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser("python -m benchmarks.imitation", description=text)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="of all but the start (0 1 2)"
    )
    parser.add_argument("--only", default="", help="only rows whose name contains this text")
    kept = Path("build/imitation.jsonl")
    parser.add_argument("--out", type=Path, default=kept, help=f"where results are kept ({kept})")
    return parser.parse_args()


if __name__ == "__main__":
    main()

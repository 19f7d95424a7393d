"""On-policy distillation of a trained policy into a fresh one, beside the GRPO that trained it:
`python -m benchmarks.imitation.distillation`.

Of each seed, the demo's initial policy is trained by GRPO as in `python -m benchmarks.algorithms`,
and becomes the teacher of the same initial policy, which then learns from its logprobs alone. Both
have the same sampler, tasks, groups, steps, optimizer and held-out tasks. One process and one
thread. Results are kept in `--out`, so that a second call resumes.

Prints the table of docs/distillation.md, draws its curve, and prints as its last line one JSON
object with each run's curve: held-out tasks solved by tokens sampled for training.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks.algorithms.run import EVAL_TASKS_PER_ENV, GROUPS, Sampler, open_policy
from benchmarks.algorithms.table import mean_interval
from benchmarks.imitation.on_policy import Course, Curve, Point, draw_curves, train_on_samples
from benchmarks.imitation.teacher import Teacher
from flotilla_environments.api import ENV_KEYS
from flotilla_environments.tiny_policy.build import build, recipe_for

GRPO, DISTILLED = "GRPO", "distillation"
COURSE = Course(steps=50, groups=GROUPS, heldout_tasks=EVAL_TASKS_PER_ENV, every=5)
HELDOUT_TASKS = EVAL_TASKS_PER_ENV * len(ENV_KEYS)

Curves = dict[tuple[str, int], list[Point]]


def main() -> None:
    given = _parse_arguments()
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "curves.jsonl"
    done = _read_curves(results)
    for seed in given.seeds:
        for name in (GRPO, DISTILLED):
            if (name, seed) not in done:
                done[name, seed] = train(name, seed, given.out)
                with results.open("a") as file:
                    entry = {"name": name, "seed": seed, "curve": done[name, seed]}
                    file.write(json.dumps(entry) + "\n")
    curves = {name: [done[name, seed] for seed in given.seeds] for name in (GRPO, DISTILLED)}
    draw_curves(given.out / "curves.svg", curves, HELDOUT_TASKS)
    print(format_table(curves))
    print(json.dumps({"tasks": HELDOUT_TASKS, "seeds": given.seeds, **curves}))


def train(name: str, seed: int, out: Path) -> list[Point]:
    """Train the initial policy of a seed; GRPO's last policy is kept, for `DISTILLED`."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    start, trained = Path(f"build/tiny-{seed}"), out / f"grpo-{seed}.pt"
    build(start, recipe_for("tools", seed))
    policy = open_policy(start)
    teacher = Teacher(start, trained) if name == DISTILLED else None
    curve = train_on_samples(policy, Sampler(start, seed), COURSE, teacher)
    if teacher is None:
        torch.save(policy.named_parameters(), trained)
    return curve


def format_table(curves: Mapping[str, Sequence[Curve]]) -> str:
    """Return a row for each point of the curves: steps, then tokens and pass@1 of each name."""
    header = "".join(f" {name}: tokens | pass@1, mean [95 % interval] | seeds |" for name in curves)
    lines = [f"| steps |{header}", "|---" * (1 + 3 * len(curves)) + "|"]
    for number in range(COURSE.steps // COURSE.every + 1):
        cells = [_format_points([curve[number] for curve in seeds]) for seeds in curves.values()]
        lines.append(f"| {number * COURSE.every} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _format_points(points: Curve) -> str:
    """Return the mean of the tokens, and the shares of each seed with their mean."""
    tokens = statistics.mean(point.tokens for point in points)
    percent = [100 * point.solved / HELDOUT_TASKS for point in points]
    low, high = mean_interval(percent)
    shares = ", ".join(f"{share:.1f}" for share in percent)
    mean = statistics.mean(percent)
    return f"{tokens / 1000:.0f} k | {mean:.1f} % [{low:.1f}, {high:.1f}] | {shares}"


def _read_curves(path: Path) -> Curves:
    lines = path.read_text().splitlines() if path.exists() else []
    return {
        (row["name"], row["seed"]): [Point(*point) for point in row["curve"]]
        for row in map(json.loads, lines)
    }


def _parse_arguments() -> argparse.Namespace:
    text = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser(
        "python -m benchmarks.imitation.distillation", description=text
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="of starts and samples (0 1 2)"
    )
    kept = Path("build/distillation")
    parser.add_argument("--out", type=Path, default=kept, help=f"folder of results ({kept})")
    return parser.parse_args()


if __name__ == "__main__":
    main()

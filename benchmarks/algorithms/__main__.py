"""The algorithms compared on the tiny policy: `python -m benchmarks.algorithms`.

Trains it from the same three starts by every estimator, and on samples of age 0, 1, 4 and 8 steps
with and without corrections; 75 runs of 5 CPU minutes. Everything runs on this machine, with the
learner's losses but without its services. `--out` keeps the results, so that a second call resumes.

Prints the tables of docs/algorithms.md, and as its last line one JSON object: for each row the
held-out pass@1 in percent (mean of a run's last three evaluations) of each seed, their mean, and
its 95 % interval (Student's t over seeds).
"""

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.algorithms.cases import Case, list_cases
from benchmarks.algorithms.run import Plan, run_case
from benchmarks.algorithms.table import format_tables, make_row
from flotilla_environments.tiny_policy.build import build, recipe_for

Job = tuple[Case, int]


def main() -> None:
    given = _parse_arguments()
    plan = Plan(steps=given.steps)
    chosen = [case for case in list_cases() if given.only in case.key]
    done = _read_results(given.out, plan)
    jobs = [
        (case, seed)
        for case in chosen
        for seed in range(given.seeds)
        if (case.key, seed) not in done
    ]
    with _make_progress() as progress:
        bar = progress.add_task("runs", total=len(chosen) * given.seeds)
        progress.advance(bar, len(chosen) * given.seeds - len(jobs))
        for (case, seed), score in _run_jobs(jobs, plan, given.jobs):
            done[case.key, seed] = score
            _append_result(given.out, plan, case, seed, score)
            progress.advance(bar)
    rows = [
        make_row(case, [done[case.key, seed] for seed in range(given.seeds)]) for case in chosen
    ]
    print(format_tables(rows))
    print(json.dumps({"steps": plan.steps, "seeds": given.seeds, "rows": rows}))


def _run_jobs(jobs: list[Job], plan: Plan, workers: int) -> Iterator[tuple[Job, float]]:
    """Yield results as they complete. Each spawned process has its own torch with one thread."""
    folders = {seed: _build_start(seed) for seed in {seed for _, seed in jobs}}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        running: dict[Future[float], Job] = {
            pool.submit(run_case, case, seed, plan, folders[seed]): (case, seed)
            for case, seed in jobs
        }
        try:
            for finished in as_completed(running):
                yield running[finished], finished.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _build_start(seed: int) -> Path:
    """Build the demo's initial policy of this seed."""
    folder = Path(f"build/tiny-{seed}")
    build(folder, recipe_for("tools", seed))
    return folder


def _make_progress() -> Progress:
    columns = (
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(file=sys.stderr))


def _read_results(path: Path, plan: Plan) -> dict[tuple[str, int], float]:
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {(r["case"], r["seed"]): r["score"] for r in rows if r["steps"] == plan.steps}


def _append_result(path: Path, plan: Plan, case: Case, seed: int, score: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        entry = {"case": case.key, "seed": seed, "steps": plan.steps, "score": score}
        file.write(json.dumps(entry) + "\n")


def _parse_arguments() -> argparse.Namespace:
    text = (__doc__ or "").split("\n\n")[0]
    parser = argparse.ArgumentParser("python -m benchmarks.algorithms", description=text)
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps of a run")
    parser.add_argument("--seeds", type=int, default=3, help="starts, each with its own policy")
    parser.add_argument("--jobs", type=int, default=2, help="parallel runs")
    parser.add_argument("--only", default="", help="only rows whose name contains this text")
    kept = Path("build/algorithms.jsonl")
    parser.add_argument("--out", type=Path, default=kept, help=f"where results are kept ({kept})")
    given = parser.parse_args()
    if given.steps < 15:
        parser.error("--steps must be at least 15: the last 11 steps are evaluated")
    return given


if __name__ == "__main__":
    main()

"""Time of a training step, by part: `python -m benchmarks.step_time [--steps 12]`.

Trains the demo for a few steps, without evaluations, and takes medians over its steps but the
first two (warm-up). The last line is one JSON object:

- `seconds_to_first_step`: from the start of the learner to the end of its first optimizer step.
- `step_seconds`, `rollout_seconds`, `train_seconds`, `sync_seconds`: medians. `rollout` is the time
  from the first lease of a step's groups to their last trajectory, `train` the optimizer step, and
  `sync` the time from publication until every engine serves it.
- `share_*`: of a step's wall time: waiting for rollout, training, publishing and waiting for
  engines, and the rest.
- `overlap_ratio`: step / max(rollout, train). 1 means that the shorter phase is fully overlapped.
- `cpu_seconds`: of the processes of each service, their starts included; vLLM's engine, the ranks
  and the environments count by themselves.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[1]
WARM_UP_STEPS = 2
SAMPLE_S = 0.5
# By a word of the command, the first that it has.
KINDS = {
    "VLLM": "engine",
    "flotilla_learner.rank": "ranks",
    "flotilla_rollout": "rollout",
    "flotilla_env_gateway": "env_gateway",
    "flotilla_learner": "learner",
    "environments": "environments",
    "flotilla_launcher": "launcher",
}


def run_demo(steps: int, runs: Path) -> tuple[Path, Mapping[str, float]]:
    """Run the demo without evaluations; return the run's folder, and CPU seconds by process."""
    command = [
        *(sys.executable, "-m", "flotilla_launcher.cli.app"),
        *("train", "deploy/runs/local.toml", "--runs", str(runs)),
        *(f"--learner.steps={steps}", "--learner.eval.sets=[]", "--learner.eval.every=0"),
    ]
    used: dict[tuple[int, float], tuple[str, float]] = {}
    with psutil.Popen(command, cwd=ROOT, stdout=sys.stderr) as demo:
        while demo.poll() is None:
            note_cpu(demo, used)
            time.sleep(SAMPLE_S)
    if demo.returncode:
        raise SystemExit(demo.returncode)
    seconds = defaultdict[str, float](float)
    for kind, cpu_s in used.values():
        seconds[kind] += cpu_s
    return next(path for path in runs.iterdir() if (path / "metrics.jsonl").exists()), seconds


def note_cpu(root: psutil.Process, used: dict[tuple[int, float], tuple[str, float]]) -> None:
    """Note the CPU seconds of a process and all below it, by their id and start."""
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            command, times = " ".join(process.cmdline()), process.cpu_times()
            kind = next((kind for word, kind in KINDS.items() if word in command), "other")
            used[process.pid, process.create_time()] = kind, times.user + times.system


def measure_steps(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the figures, from the metrics of every step."""
    timed = [row for row in rows if "timing/step" in row]
    steady = timed[WARM_UP_STEPS:]

    def median(name: str) -> float:
        return statistics.median(row[name] for row in steady if name in row)

    step, rollout, train = (median(f"timing/{name}") for name in ("step", "rollout", "train"))
    shares = {
        "rollout": median("timing/rollout_wait") / step,
        "train": train / step,
        "sync": median("timing/publish") / step,
    }
    return {
        "steps": len(timed),
        "seconds_to_first_step": timed[0]["timing/to_first_step"],
        "step_seconds": step,
        "rollout_seconds": rollout,
        "train_seconds": train,
        "sync_seconds": median("timing/sync"),
        **{f"share_{name}": value for name, value in shares.items()},
        "share_idle": max(0.0, 1 - sum(shares.values())),
        "overlap_ratio": step / max(rollout, train),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Time of a training step, by part.")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps to train")
    given = parser.parse_args()
    if given.steps <= WARM_UP_STEPS:
        parser.error(f"--steps must be above {WARM_UP_STEPS}")
    with tempfile.TemporaryDirectory() as folder:
        run, cpu_seconds = run_demo(given.steps, Path(folder))
        lines = (run / "metrics.jsonl").read_text().splitlines()
    figures = measure_steps([json.loads(line) for line in lines])
    rounded = {name: round(value, 3) for name, value in figures.items()}
    by_process = {kind: round(value, 1) for kind, value in sorted(cpu_seconds.items())}
    print(json.dumps({**rounded, "cpu_seconds": by_process}))


if __name__ == "__main__":
    main()

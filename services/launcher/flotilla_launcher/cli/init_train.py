"""`flotilla init --train`: a tiny policy for the tools of a folder, trained on this machine."""

import contextlib
import json
import subprocess
import time
import tomllib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from flotilla_common.files.durable_files import replace_file
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command
from flotilla_launcher.cli.command_runner import OK, reports_errors
from flotilla_launcher.cli.sft import ImitationRequest, imitate_run
from flotilla_launcher.cli.terminal import CommandError, Terminal, make_table, print_table
from flotilla_launcher.cli.train import TrainOptions
from flotilla_reading.demonstrations.acceptance import AcceptanceRules
from flotilla_reading.evaluation.evaluated_attempts import EvaluationError
from flotilla_reading.evaluation.run_evaluations import list_evaluations, read_evaluation
from flotilla_reading.evaluation.scores import Rate, score_evaluation
from flotilla_reading.own_tools.laptop_spec import (
    GREEDY,
    HELDOUT,
    MODEL,
    SPEC,
    Lengths,
    write_laptop_spec,
)

RUN_SPEC, DEMONSTRATIONS = Path("run.toml"), Path("demonstrations.jsonl")
TASKS = (Path("tasks/train.jsonl"), Path("tasks/heldout.jsonl"))
RUNS, RESULT = Path("runs"), Path("laptop.json")
_FIT = python_command("-m", "flotilla_environments.tiny_policy", "fit")
_ROWS = ("base", "after the warm start", "after GRPO")


@reports_errors()
def train_folder(folder: Path, seed: int) -> int:
    """Train in a folder of `flotilla init`, and print what each phase solves of the held-out tasks;
    the numbers are in `laptop.json` too."""
    missing = [each for each in (RUN_SPEC, DEMONSTRATIONS, *TASKS) if not (folder / each).exists()]
    if missing:
        raise CommandError(
            f"{folder} has no {missing[0]}: `flotilla init NAME --mcp ...` makes such a folder"
        )
    with contextlib.chdir(folder):
        return _train_here(seed, Terminal())


def _train_here(seed: int, console: Terminal) -> int:
    seconds: dict[str, float] = {}
    with _timed(seconds, "tiny policy"):
        lengths = _build_policy(seed)
    spec = tomllib.loads(RUN_SPEC.read_text(encoding="utf-8"))
    shown = sum(bool(line.strip()) for line in DEMONSTRATIONS.read_bytes().splitlines())
    replace_file(Path(SPEC), write_laptop_spec({**spec, "seed": seed}, lengths, shown).encode())
    before = _known_runs()
    with _timed(seconds, "warm start and GRPO"):
        rules = AcceptanceRules(0.0, None)
        request = ImitationRequest(str(DEMONSTRATIONS), rules, warm_start=True)
        code = imitate_run(Path(SPEC), RUNS, [], request, TrainOptions())
    if code != OK:
        return code
    [run] = _known_runs() - before
    rows = _read_rows(RUNS / run)
    _print_rows(rows, console)
    told = ", ".join(f"{phase} {spent:,.0f} s" for phase, spent in seconds.items())
    console.print(f"Wall time: {told}; by phase of the run: {RUNS / run}/summary.json")
    result = {"run": run, "seed": seed, "seconds": seconds, "rows": rows}
    replace_file(RESULT, (json.dumps(result, indent=2) + "\n").encode())
    return OK


@contextlib.contextmanager
def _timed(seconds: dict[str, float], phase: str) -> Generator[None]:
    started = time.monotonic()
    yield
    seconds[phase] = round(time.monotonic() - started, 1)


def _known_runs() -> set[str]:
    return {path.parent.name for path in RUNS.glob("*/summary.json")}


def _build_policy(seed: int) -> Lengths:
    """Build the policy, which shows its own progress. Raises CommandError."""
    command = [*_FIT, "--demonstrations", str(DEMONSTRATIONS), "--tasks", *map(str, TASKS)]
    command += ["--seed", str(seed), "--out", MODEL]
    done = subprocess.run(command, check=False, env=child_environment(ours=True))
    if done.returncode:
        raise CommandError("the tiny policy was not built; its reason is above")
    told = json.loads(Path(MODEL, "tiny_policy.json").read_text())
    return Lengths(
        prompt=told["longest_prompt"],
        demonstration=told["longest_demonstration"],
        turn=told["longest_turn"],
        turns=told["most_turns"],
    )


def _read_rows(run_dir: Path) -> dict[str, Any]:
    """Return for each evaluation of a run its rates at T = 1 and greedily. Raises CommandError."""
    try:
        found = list_evaluations(run_dir)
        return {
            name: {
                each: _to_json(_rate_of(run_dir, evaluation.step, each))
                for each in (HELDOUT, GREEDY)
            }
            for name, evaluation in zip(_ROWS, found, strict=True)
        }
    except EvaluationError as error:
        raise CommandError(str(error)) from error


def _rate_of(run_dir: Path, step: int, eval_set: str) -> Rate | None:
    try:
        _, attempts = read_evaluation(run_dir, step, eval_set)
    except EvaluationError:
        # It was given up before its first attempt, as on a machine that is too slow.
        return None
    return score_evaluation(attempts, 1)[-1].pass_at_1


def _to_json(rate: Rate | None) -> dict[str, float] | None:
    return rate and {"mean": rate.mean, "low": rate.low, "high": rate.high, "tasks": rate.tasks}


def _print_rows(rows: Mapping[str, Any], console: Terminal) -> None:
    table = make_table(("held-out tasks", "at T = 1 [95 % interval]", "greedily"))
    for name, row in rows.items():
        table.add_row(name, *(_tell(row[each]) for each in (HELDOUT, GREEDY)))
    print_table(table, console)


def _tell(rate: Mapping[str, float] | None) -> str:
    if rate is None:
        return "no grade"
    return f"{rate['mean']:.1%} [{rate['low']:.1%}, {rate['high']:.1%}]"

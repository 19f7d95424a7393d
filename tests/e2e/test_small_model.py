"""A real model, SmolLM2-135M, is played and trained by one command: engine and trainer agree before
and after real updates."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_environments.task_generator import Split
from flotilla_environments.tasks import make_tasks
from tests.e2e.finished_run import FinishedRun, train
from tests.e2e.test_zoo import VERIFIER
from tests.support.architectures import TOLERANCE
from tests.support.model_zoo import need_zoo

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    # What transformers and torch warn about is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

STEPS = 2
GROUPS = 2
ATTEMPTS = 2
EVAL_TASKS = 2
LORA = "--learner.lora.rank=8"
VARIANTS = {
    "float32": (),
    "adapters": (LORA, "--policy.adapter_rank=8", "--learner.optimizer.lr=1e-3"),
    "merged-adapters": (LORA, "--learner.optimizer.lr=1e-3"),
    "two-ranks": ("--learner.rank.processes=2", "--learner.rank.shard=true"),
    # Its canary and probes differ just beyond the default bounds (docs/mismatch.md).
    "bfloat16": (
        "--policy.dtype=bfloat16",
        "--learner.guard.mean_bound=0.2",
        "--learner.guard.tail_bound=1.0",
        "--learner.guard.kl_bound=0.02",
    ),
}
# In bfloat16 single tokens differ by up to 0.6 (docs/mismatch.md).
BOUNDS = {"bfloat16": ("abs_diff_mean", 0.15)}
AUDITED = ("tokens", "abs_diff_mean", "abs_diff_tail", "abs_diff_max", "kl")


# So small a model calls tools only by example.
EXAMPLES = "".join(
    f"Find the bookings of {guest} in {city}: <tool_call>"
    f'{{"name": "find_bookings", "arguments": {{"guest": "{guest}", "city": "{city}"}}}}'
    "</tool_call>\n"
    for guest, city in (("Ann", "Rome"), ("Bob", "Oslo"))
)
CANCEL = "Cancel the booking of "


def write_tasks(folder: Path, split: Split, count: int) -> str:
    """Tasks of one tool, with the verifier of forced rewards."""
    chosen = [
        dict(task)
        | {
            "prompt": f"{EXAMPLES}Find the bookings of {task['prompt'][len(CANCEL) : -1]}:",
            "verifier_func": VERIFIER,
            "offered_tools": ["find_bookings"],
            "env_variables": {},
        }
        for task in make_tasks(("booking",), split, 10 * count)
        if task["prompt"].startswith(CANCEL)
    ]
    path = folder / f"{split}.json"
    path.write_text(json.dumps({"tasks": chosen[:count]}))
    return str(path)


def make_spec(folder: Path) -> Path:
    """A run of few tokens, whose greedy evaluation is played before any step."""
    digest = hashlib.sha256(VERIFIER.encode()).hexdigest()
    (folder / "verifiers.sha256").write_text(f"{digest}  forced\n")
    spec: dict[str, Any] = {
        "name": "smollm2",
        "policy": {
            "model": str(need_zoo("models/smollm2-135m")),
            "dtype": "float32",
            "max_model_len": 768,
        },
        "env_gateway": {
            "backend": "embedded",
            "verifiers": {"digests": "verifiers.sha256", "partial": "off"},
        },
        "rollout": {
            "max_attempts": GROUPS * ATTEMPTS,
            "max_turns": 2,
            "max_input_length": 640,
            "max_generate_length": 64,
            "burn_in": {"enabled": False},
            # Its chat template shows no tools.
            "dialect": {"name": "full"},
            "engine": {"device": "cpu", "max_num_seqs": GROUPS * ATTEMPTS},
        },
        "learner": {
            "tasks": write_tasks(folder, "train", STEPS * GROUPS),
            "steps": STEPS,
            "groups_per_step": GROUPS,
            "group_size": ATTEMPTS,
            # The second step then trains on what the first has published.
            "max_staleness": 0,
            "optimizer": {"lr": 1e-5},
            "rank": {"burn_in": {"enabled": False}, "post_update_tokens": 0},
            "eval": {
                "sets": [
                    {
                        "name": "heldout",
                        "tasks": write_tasks(folder, "heldout", EVAL_TASKS),
                        "temperature": 0.0,
                        "when": ["before"],
                    }
                ]
            },
        },
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    return path


def check_attempts(run: FinishedRun) -> None:
    """Check that no attempt was lost, and that tools were called and their answers read."""
    attempts = run.trajectories()
    assert len(attempts) == STEPS * GROUPS * ATTEMPTS + EVAL_TASKS
    assert [(each.failure, each.detail) for each in attempts if each.failure is not None] == []
    assert any(each.counts.tool_calls and len(each.turns) > 1 for each in attempts)


def check_updates(run: FinishedRun) -> None:
    rows = run.metrics("policy/grad_norm")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["policy/skipped"] == 0 and row["policy/grad_norm"] > 0 for row in rows)
    assert len(set(run.rows("SELECT fingerprint FROM publications"))) == STEPS + 1


def check_agreement(run: FinishedRun, variant: str) -> None:
    """Check and print what the guard has measured at versions 0 and 1."""
    guarded = run.metrics("mismatch/audit_abs_diff_max")
    assert [(row["step"], row["mismatch/guard_level"]) for row in guarded] == [(1, 0), (2, 0)]
    for row in guarded:
        found = {name: row[f"mismatch/audit_{name}"] for name in AUDITED}
        print(variant, f"version {row['step'] - 1}", found)
        assert found["tokens"] > 50
        name, bound = BOUNDS.get(variant, ("abs_diff_max", TOLERANCE))
        assert found[name] <= bound


@pytest.mark.parametrize("variant", VARIANTS)
def test_it_is_trained_for_two_steps_on_what_its_engine_samples(
    variant: str, tmp_path: Path
) -> None:
    run = train(make_spec(tmp_path), tmp_path / "runs", *VARIANTS[variant], timeout_s=2900.0)
    assert run.exit_code == 0, run.output[-4000:]
    check_attempts(run)
    check_updates(run)
    check_agreement(run, variant)

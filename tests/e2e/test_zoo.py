"""Every architecture of the zoo is trained for two steps by one command: engine and trainer agree
before and after real updates, and its template loses no attempt."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flotilla_common.domain.attempts import StopReason
from flotilla_common.domain.token_authors import Author
from flotilla_common.domain.trajectory import Sequence
from flotilla_common.models.multimodal_models import other_parts
from flotilla_environments.api import ENV_KEYS
from flotilla_environments.tasks import make_tasks
from tests.e2e.finished_run import FinishedRun, Scorer, distances, train
from tests.support.architectures import ARCHITECTURES, MULTIMODAL, PARALLEL, TOLERANCE, Architecture

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    # What transformers and torch warn about is theirs to mend.
    pytest.mark.filterwarnings("default"),
]

STEPS = 2
GROUPS = 3
ATTEMPTS = 4
EVAL_TASKS = 6
MAX_TURNS = 3
# Random tokens solve nothing, so that their rewards are forced: attempts that wrote different
# tokens earn different ones.
VERIFIER = '''\
def forced(env, final_answer=None, conversation=None):
    """Earn what the characters of the conversation add up to."""
    return sum(map(ord, conversation or "")) % 101 / 100
'''


@dataclass(frozen=True)
class Trained:
    """A model and the run that has trained it."""

    model: Path
    run: FinishedRun


def train_model(architecture: Architecture, folder: Path, *overrides: str) -> Trained:
    """Make the model, and run `flotilla train` for two steps on policy."""
    model = folder / "model"
    architecture.make_folder(model)
    spec = folder / "spec.json"
    spec.write_text(json.dumps(make_spec(architecture, model, folder)))
    return Trained(model, train(spec, folder / "runs", *overrides, timeout_s=1400.0))


def make_spec(architecture: Architecture, model: Path, folder: Path) -> dict[str, Any]:
    digest = hashlib.sha256(VERIFIER.encode()).hexdigest()
    (folder / "verifiers.sha256").write_text(f"{digest}  forced\n")
    return {
        "name": "zoo",
        "policy": {"model": str(model), "dtype": "float32", "max_model_len": 2560},
        "env_gateway": {
            "backend": "embedded",
            "verifiers": {"digests": "verifiers.sha256", "partial": "off"},
        },
        "rollout": {
            "max_attempts": 12,
            "max_turns": MAX_TURNS,
            "max_input_length": 2400,
            "max_generate_length": 24,
            # A turn without a call is answered as its template answers.
            "dialect": {**architecture.dialect, "finish": "done"},
            "engine": {"device": "cpu", "max_num_seqs": 12},
        },
        "learner": {
            "tasks": write_tasks(folder, "train", 2 * GROUPS),
            "steps": STEPS,
            "groups_per_step": GROUPS,
            "group_size": ATTEMPTS,
            # Each step then trains on what the step before it published.
            "max_staleness": 0,
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"every": 1, "keep": STEPS},
            "eval": {
                "sets": [{"name": "heldout", "tasks": write_tasks(folder, "heldout", EVAL_TASKS)}]
            },
        },
    }


def write_tasks(folder: Path, split: Any, count: int) -> str:
    """Tasks with tools, and with the verifier of forced rewards."""
    tasks = [
        dict(task) | {"verifier_func": VERIFIER} for task in make_tasks(ENV_KEYS, split, count)
    ]
    path = folder / f"{split}.json"
    path.write_text(json.dumps({"tasks": tasks}))
    return str(path)


def check_updates(trained: Trained) -> None:
    """Check that both steps have changed the policy."""
    rows = trained.run.metrics("policy/grad_norm")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["policy/skipped"] == 0 and row["policy/grad_norm"] > 0 for row in rows)
    published = trained.run.rows("SELECT version, fingerprint FROM publications")
    assert len(dict(published)) == len({fingerprint for _, fingerprint in published}) == STEPS + 1


def check_attempts(trained: Trained) -> None:
    """Check that no attempt was lost: each went on after every turn that ended by itself."""
    attempts = trained.run.trajectories()
    assert len(attempts) == STEPS * GROUPS * ATTEMPTS + 2 * EVAL_TASKS
    assert [(each.failure, each.detail) for each in attempts if each.failure is not None] == []
    reasons = {each.stop_reason for each in attempts if len(each.turns) < MAX_TURNS}
    assert reasons <= {StopReason.GENERATION_LENGTH}


def check_agreement(trained: Trained) -> None:
    """Check what the guard has measured at versions 0 and 1, and all versions by transformers."""
    guarded = trained.run.metrics("mismatch/audit_abs_diff_max")
    assert [(row["step"], row["mismatch/guard_level"]) for row in guarded] == [(1, 0), (2, 0)]
    assert max(row["mismatch/audit_abs_diff_max"] for row in guarded) <= TOLERANCE
    saved = [trained.run.export_step(step, trained.model) for step in range(1, STEPS + 1)]
    scorers = [Scorer(folder) for folder in (trained.model, *saved)]
    for version, scorer in enumerate(scorers):
        assert largest_distance(trained, scorer, version) <= TOLERANCE, f"version {version}"
    for version in range(1, STEPS + 1):
        stale = largest_distance(trained, scorers[version - 1], version)
        assert stale > 10 * TOLERANCE, "the update changed too little"


def largest_distance(trained: Trained, scorer: Scorer, version: int) -> float:
    """Return the largest difference at the tokens that a version wrote and that are kept."""
    sequences = [s for each in trained.run.trajectories() for s in each.sequences]
    found = np.concatenate([distances(each, scorer, version) for each in sequences])
    assert len(found) > 20, f"too few tokens of version {version}"
    return float(np.abs(found).max())


def check_other_parts(trained: Trained) -> None:
    """Check that an export has the weights that training leaves as they are, bit for bit."""
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (trained.model, trained.run.folder / "model")
    )
    kept = other_parts(before)
    assert kept and all(torch.equal(before[name], after[name]) for name in kept)


def check_run(trained: Trained) -> None:
    assert trained.run.exit_code == 0, trained.run.output
    check_attempts(trained)
    check_updates(trained)
    check_agreement(trained)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
def test_it_is_trained_for_two_steps_on_what_its_engine_samples(
    architecture: Architecture, tmp_path: Path
) -> None:
    trained = train_model(architecture, tmp_path)
    check_run(trained)
    if architecture in MULTIMODAL:
        check_other_parts(trained)


@pytest.mark.parametrize("architecture", PARALLEL, ids=lambda each: each.name)
def test_it_is_trained_on_what_two_workers_of_its_engine_sample(
    architecture: Architecture, tmp_path: Path
) -> None:
    check_run(train_model(architecture, tmp_path, "--rollout.engine.tensor_parallel=2"))


@pytest.mark.parametrize("architecture", PARALLEL, ids=lambda each: each.name)
def test_it_is_trained_by_two_ranks_that_hold_a_part_each(
    architecture: Architecture, tmp_path: Path
) -> None:
    ranks = ("--learner.rank.processes=2", "--learner.rank.shard=true")
    check_run(train_model(architecture, tmp_path, *ranks))


@pytest.mark.parametrize("ranks", [(), ("--learner.rank.processes=2", "--learner.rank.shard=true")])
def test_a_mixture_of_experts_is_trained_with_those_that_its_engine_chose(
    ranks: tuple[str, ...], tmp_path: Path
) -> None:
    experts = next(each for each in ARCHITECTURES if each.name == "Qwen3-MoE")
    trained = train_model(experts, tmp_path, "--policy.routing_replay=replay", *ranks)
    check_run(trained)
    for attempt in trained.run.trajectories():
        for sequence in attempt.sequences:
            assert sequence.experts is not None
            assert len(sequence.experts) == len(sequence.token_ids) - 1 - trailing(sequence)
    # In float32 hardly any choice is close enough to fall otherwise.
    for row in trained.run.metrics("mismatch/rerouted_tokens"):
        assert row["mismatch/rerouted_tokens"] < 0.01


def trailing(sequence: Sequence) -> int:
    """Return the tokens behind the last that the policy wrote: no engine has read them."""
    last = sequence.spans[-1]
    return 0 if last.author is Author.POLICY else last.length

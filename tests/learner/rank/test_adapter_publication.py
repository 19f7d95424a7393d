"""A rank publishes adapters alone where engines take these, and computes as they do."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import SharedConfig
from flotilla_common.weights.fingerprint import compute_fingerprint
from flotilla_learner.config.learner import WeightsConfig
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.rank.adapter_files import BASE_MARK
from flotilla_learner.rank.compare_command import CompareCommand
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.packed_rows import RowPacker
from flotilla_learner.rank.rank_setup import load_models
from flotilla_learner.rank.rows import Row
from flotilla_learner.rank.scoring import score_rows
from flotilla_learner.rank.worker import FirstRank
from flotilla_learner.ranks.protocol import decode_publication
from flotilla_learner.types import TrainBatch, TrainSequence
from tests.support.adapted_learner import RANK, AdaptedLearner, adapted_setup
from tests.support.checkpoints import write_models
from tests.support.rank_configs import LEARNER, policy_config
from tests.support.tiny_ranks import (
    changed,
    make_batch,
    make_trainer,
    same_bits,
    trained_parameters,
)

LORA = LoraConfig(rank=RANK, alpha=6.0)


def scores(policy: Policy) -> dict[int, np.ndarray]:
    rows = [Row.from_sequence(i, s) for i, s in enumerate(make_batch().sequences)]
    return score_rows(policy, rows, RowPacker(policy, 256, Replicas()), chunk=16)


def distance(one: dict[int, np.ndarray], other: dict[int, np.ndarray]) -> float:
    return max(float(np.abs(one[index] - other[index]).max()) for index in one)


def test_the_first_rank_publishes_what_is_added_and_the_name_of_its_base(
    model_folder: Path, untied_folder: Path, tmp_path: Path
) -> None:
    """B comes times alpha / rank, and the fingerprint differs where the base does."""
    names: list[bytes] = []
    for folder in (model_folder, untied_folder):
        setup = adapted_setup(folder, tmp_path / folder.name)
        models = load_models(setup)
        with torch.no_grad():
            for parameter in models.policy.trained_parameters().values():
                parameter.fill_(0.5)
        rank = FirstRank(setup, models)
        found = decode_publication(rank.publish_weights({"version": 0}))
        names.append(found.fingerprint)
        assert models.base is not None
        written = load_file(found.path)
        base = written.pop(BASE_MARK)
        assert base.view(torch.uint8).numpy().tobytes().hex() == models.base.fingerprint
        assert written.keys() == models.policy.saved_parameters().keys()
        assert {float(t.max()) for n, t in written.items() if ".lora_A." in n} == {0.5}
        assert {float(t.max()) for n, t in written.items() if ".lora_B." in n} == {0.75}
        assert compute_fingerprint(found.manifest, found.total_bytes) == found.fingerprint
        # Loading it again shows that the base is the same.
        assert rank.model_info().reference is None
        rank.close()
    assert names[0] != names[1]


def test_what_is_loaded_again_is_published_under_the_same_name(
    model_folder: Path, tmp_path: Path
) -> None:
    """The first adapters, and those of a checkpoint."""
    learner = AdaptedLearner(model_folder, tmp_path / "shm")
    names = [learner.publish().policy.fingerprint]
    learner.train()
    names.append(learner.publish().policy.fingerprint)
    write_models(tmp_path / "saved", learner.models, 1)
    again = adapted_setup(model_folder, tmp_path / "again")
    found: list[bytes] = []
    for version, source in enumerate((None, tmp_path / "saved")):
        setup = again.model_copy(update={"checkpoint": source})
        rank = FirstRank(setup, load_models(setup))
        reported = decode_publication(rank.publish_weights({"version": version}))
        found.append(reported.fingerprint)
        rank.close()
    assert found == names
    assert names[0] != names[1]


def test_a_publication_has_the_adapters_bytes_and_no_more(
    model_folder: Path, tmp_path: Path
) -> None:
    learner = AdaptedLearner(model_folder, tmp_path / "shm")
    adapters = learner.models.policy.trained_parameters().values()
    header = 256 * (len(adapters) + 2)
    assert learner.publish().total_bytes < 4 * sum(p.numel() for p in adapters) + header


def test_training_is_that_of_merged_weights_but_for_rounding(model_folder: Path) -> None:
    (merged, _, first), (separate, _, second) = (
        make_trainer(model_folder, lora=LORA, adapter_rank=rank) for rank in (None, RANK)
    )
    for step in (1, 2, 3):
        batch = make_batch(step=step)
        one, other = (trainer.train_step(batch, lr=1e-3).metrics for trainer in (first, second))
        for name in ("policy/loss", "policy/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
    assert distance(scores(merged), scores(separate)) < 1e-3


def test_older_publications_score_with_their_own_adapters(
    model_folder: Path, tmp_path: Path
) -> None:
    learner = AdaptedLearner(model_folder, tmp_path / "shm")
    policy = learner.models.policy
    sequences: list[TrainSequence] = []
    for version in (0, 1, 2):
        learner.publish()
        sampled = changed(make_batch(policy, step=version + 1, groups=1), staleness=2 - version)
        sequences += sampled.sequences
        if version < 2:
            learner.train()
    own, held = scores(policy), trained_parameters(policy)
    comparing = CompareCommand(policy, learner.slots, learner.setup.policy, learner.setup.rank)
    found = comparing.run_comparison(TrainBatch(3, tuple(sequences)), 2, diagnose=True)
    assert found.versions.keys() == {0, 1, 2}
    assert max(version.abs_diff_max for version in found.versions.values()) < 1e-4
    stale = {h.value: h.effect for h in found.hypotheses if h.setting == "weights"}
    assert stale["those of version 0"] > stale["those of version 1"] > 0.01
    first = "those of policy.model, which the run began with"
    assert stale[first] == pytest.approx(stale["those of version 0"], rel=1e-4)
    assert not any(BASE_MARK in value for value in stale)
    # Nothing of it stays in the model.
    assert distance(scores(policy), own) == 0
    assert same_bits(trained_parameters(policy), held)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"lora": None}, "learner.lora.rank is absent"),
        ({"lora": LoraConfig(rank=8)}, "learner.lora.rank is 8"),
        ({"weights": WeightsConfig(transfer="gloo")}, "'gloo' sends whole weights"),
        ({"weights": WeightsConfig(transfer="ipc")}, "'ipc' sends whole weights"),
    ],
)
def test_a_spec_whose_parts_publish_different_things_is_refused(
    changes: dict[str, object], why: str, tmp_path: Path
) -> None:
    shared = SharedConfig(name="run", policy=policy_config(tmp_path, adapter_rank=RANK))
    right = LEARNER.model_copy(update={"lora": LORA})
    right.check(shared)
    with pytest.raises(ConfigError, match=why):
        right.model_copy(update=changes).check(shared)
    # Merged weights go with all of it.
    right.model_copy(update=changes).check(SharedConfig(name="run", policy=policy_config(tmp_path)))

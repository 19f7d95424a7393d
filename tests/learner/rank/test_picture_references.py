"""The reference of a policy that sees, sees as the model that the run began with; and what is
published of it has one name, frozen parts included."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from flotilla_common.images.picture import ShownPicture
from flotilla_common.images.pixels import PixelReader
from flotilla_common.spec.spec import VisionConfig
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.lora import LoraConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.adapter_files import BaseRecord
from flotilla_learner.rank.data_parallel import Replicas
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.packed_rows import RowPacker
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.reference import ReferencePolicy
from flotilla_learner.rank.rows import ByRow, Row
from flotilla_learner.rank.scoring import score_rows
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_learner.types import TrainBatch
from tests.support.picture_batches import PICTURES, family_of, picture_batch
from tests.support.rank_configs import policy_config
from tests.support.vision_models import load_vision_model, vision_inputs, vision_logprobs

KINDS = ("qwen2_5_vl", "qwen3_vl")
FROZEN, TRAINED = VisionConfig(), VisionConfig(tower="trained", projector="trained")
RANK = RankConfig(pack_tokens=512, head_chunk=16)
LORA = LoraConfig(rank=4, alpha=8)
WAYS = pytest.mark.parametrize(
    ("vision", "lora"),
    [
        pytest.param(FROZEN, None, id="frozen"),
        pytest.param(TRAINED, None, id="trained"),
        pytest.param(FROZEN, LORA, id="adapters"),
    ],
)
Folders = Callable[[str], Path]


def drifted(
    folder: Path, vision: VisionConfig, lora: LoraConfig | None = None
) -> tuple[Policy, ReferencePolicy]:
    """A policy, and the reference that all that is trained of it has left."""
    config = policy_config(folder, vision=vision, max_model_len=256)
    policy = load_policy(config, RANK, lora=lora)
    if lora is None:
        reference = ReferencePolicy.from_config(config, policy, offload=True)
    else:
        reference = ReferencePolicy.copy_of(policy, offload=True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.trained_parameters().values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy, reference


def score(policy: Policy, batch: TrainBatch) -> ByRow:
    rows = [Row.from_sequence(i, s) for i, s in enumerate(batch.sequences)]
    with policy.showing(batch):
        return score_rows(policy, rows, RowPacker(policy, 512, Replicas()), chunk=16)


def published(folder: Path, batch: TrainBatch) -> ByRow:
    """Return the logprobs of policy tokens by transformers' own passes of a model's files."""
    family, model = family_of(folder), load_vision_model(folder)
    reader, by_hash = PixelReader(folder, family), {p.sha256: p for p in PICTURES}
    found: ByRow = {}
    for index, sequence in enumerate(batch.sequences):
        shown = [ShownPicture(by_hash[place.sha256], place) for place in sequence.pictures]
        inputs = vision_inputs(sequence.token_ids, shown, family, reader)
        scores = vision_logprobs(
            model, inputs, banned=family.banned_ids, temperature=sequence.temperature
        )
        found[index] = scores[sequence.policy_mask[1:]]
    return found


def distance(one: ByRow, other: ByRow) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[index] - other[index]).max()) for index in one)


@WAYS
@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_sees_as_the_model_that_the_run_began_with(
    kind: str, vision: VisionConfig, lora: LoraConfig | None, vision_folder: Folders
) -> None:
    folder = vision_folder(kind)
    policy, reference = drifted(folder, vision, lora)
    batch = picture_batch(family_of(folder), blind=[1])
    expected = published(folder, batch)
    with reference.on_policy_device() as frozen:
        assert distance(score(frozen, batch), expected) < 1e-5
    assert distance(score(policy, batch), expected) > 0.1


@WAYS
def test_the_penalty_is_measured_from_it(
    vision: VisionConfig, lora: LoraConfig | None, vision_folder: Folders
) -> None:
    """The estimate k1 of a step, before its update, is the mean difference of logprobs."""
    folder = vision_folder("qwen3_vl")
    policy, reference = drifted(folder, vision, lora)
    batch = picture_batch(family_of(folder))
    own, base = score(policy, batch), published(folder, batch)
    gaps = np.concatenate([own[index] - base[index] for index in own])
    metrics = step(policy, reference, batch)
    assert metrics["policy/kl"] == pytest.approx(float(gaps.mean()), abs=1e-5)
    assert abs(gaps.mean()) > 0.01
    assert metrics["policy/grad_norm"] > 0
    with reference.on_policy_device() as frozen:
        assert distance(score(frozen, batch), base) < 1e-5, "the step has moved it"


def step(policy: Policy, reference: ReferencePolicy, batch: TrainBatch) -> Mapping[str, float]:
    algorithm = AlgorithmConfig.model_validate({"kl": {"coefficient": 0.1, "estimator": "k1"}})
    optimizer = Optimizer(policy.trained_parameters(), OptimizerConfig(lr=1e-2))
    trainer = Trainer(policy, optimizer, algorithm, RANK, reference=reference)
    return trainer.train_step(batch, 1e-2).metrics


def shifted(folder: Path, part: str, target: Path) -> Path:
    """Write a model that differs in one number of the first parameter whose name has `part`."""
    model = load_vision_model(folder)
    with torch.no_grad():
        found = next(value for name, value in model.named_parameters() if part in name)
        found.view(-1)[0] += 1
    for path in folder.glob("*.json"):
        target.mkdir(exist_ok=True)
        (target / path.name).write_bytes(path.read_bytes())
    model.save_pretrained(target)
    return target


@pytest.mark.parametrize("vision", [FROZEN, TRAINED], ids=["frozen", "trained"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_name_of_a_policy_covers_all_of_it(
    kind: str, vision: VisionConfig, vision_folder: Folders, tmp_path: Path
) -> None:
    """That of a publication, of a reference, and of the base of adapters: one number of the tower,
    the projector or the text makes another, whether it is trained or not."""
    parts = {"tower": "visual.blocks", "projector": "visual.merger", "text": "self_attn.q_proj"}
    folder = vision_folder(kind)
    names: set[bytes] = set()
    others = [shifted(folder, part, tmp_path / name) for name, part in parts.items()]
    for each in (folder, *others):
        config = policy_config(each, vision=vision)
        policy = load_policy(config, RANK)
        shm = tmp_path / f"shm-{each.name}"
        shm.mkdir()
        slots = WeightSlots(policy.published_parameters(), policy.compute_dtype, shm, "run")
        _, name, manifest = slots.write_version(0)
        assert {entry.name for entry in manifest} == dict(
            load_vision_model(each).named_parameters()
        ).keys()
        assert ReferencePolicy.from_config(config, policy, offload=False).weights_fingerprint() == (
            name
        )
        frozen = config.model_copy(update={"vision": FROZEN})
        adapted = load_policy(frozen, RANK, lora=LORA)
        assert BaseRecord.of_policy(adapted, frozen).fingerprint == name.hex()
        names.add(name)
    assert len(names) == len(others) + 1

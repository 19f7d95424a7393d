"""A checkpoint whose tensors lie in the files of several ranks."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.checkpoints.export import ExportError, export_model
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.model_loading import ModelError
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.split_loading import MODEL
from flotilla_learner.rank.tensor_shards import TensorShardError, shard_pattern
from flotilla_learner.run_files.rank_record import RECORD_FILE
from tests.support.checkpoints import load_group, saved_state, write_checkpoint
from tests.support.rank_configs import policy_config
from tests.support.split_checkpoints import split_checkpoint
from tests.support.tiny_ranks import make_batch, make_trainer, same_bits


@pytest.fixture
def policy(model_folder: Path) -> PolicyConfig:
    return policy_config(model_folder)


@pytest.fixture
def saved(model_folder: Path, tmp_path: Path) -> Path:
    """The checkpoint of one rank, with its optimizer's moments."""
    trained, optimizer, trainer = make_trainer(model_folder)
    trainer.train_step(make_batch(), lr=1e-2)
    write_checkpoint(tmp_path / "saved", trained, optimizer, 1)
    return tmp_path / "saved"


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_is_read_and_exported_as_that_of_one(
    saved: Path, policy: PolicyConfig, tmp_path: Path, ranks: int
) -> None:
    parts = split_checkpoint(saved, tmp_path / "parts", ranks)
    assert len(list(parts.glob("*.safetensors"))) == ranks
    assert same_bits(saved_state(parts), saved_state(saved))
    for source in (saved, parts):
        export_model(source, Path(policy.model), policy, tmp_path / f"model-of-{source.name}")
    one, several = (
        load_file(tmp_path / f"model-of-{name}" / "model.safetensors")
        for name in ("saved", "parts")
    )
    assert same_bits(several, one)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_tensor_of_which_one_ranks_part_is_missing_is_named(
    saved: Path, policy: PolicyConfig, tmp_path: Path, lost: int
) -> None:
    parts = split_checkpoint(saved, tmp_path / "parts", 3)
    (path,) = parts.glob(shard_pattern(lost))
    path.unlink()
    incomplete = r"parts lacks parts of model/model\.\S+$"
    with pytest.raises(TensorShardError, match=incomplete):
        load_group(parts, MODEL)
    with pytest.raises(ModelError, match=incomplete):
        load_policy(policy, RankConfig(), parts)
    after = rf"parts: shard-{lost + 2:05d}-\S+ does not continue model\.\S+$"
    with pytest.raises(ExportError, match=after if lost < 2 else incomplete):
        export_model(parts, Path(policy.model), policy, tmp_path / "model")


def test_a_record_without_the_shapes_of_tensors_is_refused(
    saved: Path, policy: PolicyConfig, tmp_path: Path
) -> None:
    for text, why in (
        ('{"step": 1}', r"rank\.json has no tensor shapes: KeyError\('shapes'\)"),
        ('{"step": 1, "shapes": 3}', r"rank\.json has no tensor shapes: "),
        ("[]", r"rank\.json is not a JSON object"),
        ("{", r"cannot read .*rank\.json: Expecting"),
    ):
        (saved / RECORD_FILE).write_text(text)
        with pytest.raises(TensorShardError, match=why):
            load_group(saved, MODEL)
        with pytest.raises(ModelError, match=why):
            load_policy(policy, RankConfig(), saved)
        with pytest.raises(ExportError, match=why):
            export_model(saved, Path(policy.model), policy, tmp_path / "model")


def test_a_tensor_that_no_file_has_is_named(
    saved: Path, policy: PolicyConfig, tmp_path: Path
) -> None:
    record = json.loads((saved / RECORD_FILE).read_text())
    record["shapes"]["model/more"] = [2]
    (saved / RECORD_FILE).write_text(json.dumps(record))
    with pytest.raises(TensorShardError, match=r"has no model/more$"):
        load_group(saved, MODEL)
    with pytest.raises(ExportError, match=r"lacks parts of model/more$"):
        export_model(saved, Path(policy.model), policy, tmp_path / "model")

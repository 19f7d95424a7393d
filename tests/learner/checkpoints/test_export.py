"""A checkpoint as a model folder: its files, and the same model when other libraries load it."""

import asyncio
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flotilla_common.files.durable_files import sha256_of
from flotilla_common.run_folder.journal_file import JOURNAL_FILE
from flotilla_common.spec.spec import PolicyConfig
from flotilla_launcher.cli.eval_sources import find_model, identify_model
from flotilla_launcher.cli.terminal import CommandError
from flotilla_learner.checkpoints import export_command as command
from flotilla_learner.checkpoints.export import ExportError, export_model, to_bfloat16
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank.canary import canary_token_ids
from flotilla_learner.rank.checkpoint import write_rank_files
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.split_loading import MODEL
from flotilla_learner.rank.tensor_shards import flatten_groups
from flotilla_learner.run_files.checkpoint_manifest import FileEntry, Manifest, write_manifest
from flotilla_learner.run_files.rank_record import write_record
from tests.support.checkpoints import load_group, write_checkpoint
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import learner, make_config
from tests.support.rank_configs import policy_config
from tests.support.remote_checkpoints import UploadingMachine, query, train
from tests.support.tiny_ranks import YARN, reference_logprobs

TOKENIZER = {"tokenizer.json": "{}", "tokenizer_config.json": '{"chat_template": "x"}'}
MakeCheckpoint = Callable[..., tuple[Path, PolicyConfig]]


@pytest.fixture
def make_checkpoint(tmp_path: Path, model_folder: Path, untied_folder: Path) -> MakeCheckpoint:
    """Make a checkpoint of a random model whose parameters were changed since its folder was
    written."""

    def make(*, tied: bool = True, **policy: Any) -> tuple[Path, PolicyConfig]:
        base = shutil.copytree(model_folder if tied else untied_folder, tmp_path / "base")
        for name, text in TOKENIZER.items():
            (base / name).write_text(text)
        return train_checkpoint(tmp_path, base, **policy)

    return make


def train_checkpoint(folder: Path, base: Path, **policy: Any) -> tuple[Path, PolicyConfig]:
    """The checkpoint of a model in `base`, its parameters changed."""
    config = policy_config(base, **policy)
    loaded = load_policy(config, RankConfig())
    with torch.no_grad():
        for value in loaded.named_parameters().values():
            value.mul_(1.0 + 1.0 / 3.0)
    optimizer = Optimizer(loaded.named_parameters(), OptimizerConfig())
    write_checkpoint(folder / "checkpoint", loaded, optimizer, 7)
    return folder / "checkpoint", config


def logprobs(folder: Path, dtype: torch.dtype) -> np.ndarray:
    """Return logprobs of a fixed sequence, by transformers alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model.eval()
    ids = canary_token_ids(model.config.vocab_size)
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1]
    targets = torch.from_numpy(ids[1:].astype(np.int64))[:, None]
    return logits.float().log_softmax(-1).gather(1, targets).squeeze(1).numpy()


@pytest.mark.parametrize(("tied", "scaling"), [(True, None), (False, None), (True, YARN)])
def test_transformers_loads_it_and_gives_the_same_logprobs(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, tied: bool, scaling: dict[str, Any] | None
) -> None:
    saved, policy = make_checkpoint(tied=tied, rope_scaling=scaling)
    out = tmp_path / "model"
    export_model(saved, Path(policy.model), policy, out)
    trained = load_policy(policy, RankConfig(), saved)
    ids = canary_token_ids(trained.head.shape[0])
    expected = reference_logprobs(trained, ids, 1.0)
    np.testing.assert_allclose(logprobs(out, torch.float32), expected, atol=1e-5)
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["tie_word_embeddings"] is tied
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) is not tied
    if scaling:
        assert config["rope_parameters"]["rope_type"] == "yarn"
        assert config["max_position_embeddings"] == 128


def test_its_weights_are_rounded_to_the_dtype_of_the_run_as_torch_rounds(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    saved, policy = make_checkpoint(dtype="bfloat16")
    out = tmp_path / "model"
    export_model(saved, Path(policy.model), policy, out)
    before = load_group(saved, MODEL)
    after = load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], before[name].bfloat16()) for name in before)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    model: Any = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16


def test_bfloat16_of_every_kind_of_number_is_that_of_torch() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 1 << 20, dtype=np.uint32)
    # Zeros, infinities, the largest, the least, and two that lie halfway.
    special = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 1, 0x3F808000, 0x3F818000]
    values = np.concatenate([bits, np.array(special, np.uint32)]).view(np.float32)
    expected = torch.from_numpy(values.copy()).bfloat16()
    found = torch.from_numpy(to_bfloat16(values).view(np.int16)).view(torch.bfloat16)
    assert torch.equal(found.isnan(), expected.isnan())
    whole = ~expected.isnan()
    assert torch.equal(found[whole].view(torch.int16), expected[whole].view(torch.int16))


def test_all_its_files_are_named_with_their_hashes(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    saved, policy = make_checkpoint()
    out = tmp_path / "model"
    export_model(saved, Path(policy.model), policy, out)
    assert sorted(path.name for path in out.iterdir()) == [
        "SHA256SUMS",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    checked = subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=out, check=False)
    assert checked.returncode == 0


def test_code_of_a_model_goes_along_only_where_the_run_trusts_it(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    saved, policy = make_checkpoint()
    assets = Path(policy.model)
    (assets / "modeling_own.py").write_text("")
    (assets / "pytorch_model.bin").write_text("")
    (assets / "generation_config.json").write_text('{"eos_token_id": 5}')
    for trusted in (False, True):
        changed = policy.model_copy(update={"trust_remote_code": trusted})
        export_model(saved, assets, changed, tmp_path / "model")
        names = {path.name for path in (tmp_path / "model").iterdir()}
        assert ("modeling_own.py" in names) is trusted
        assert "pytorch_model.bin" not in names
    text = (tmp_path / "model" / "generation_config.json").read_text()
    assert text == '{"eos_token_id": 5}', "the model's own, not one that was made up"


def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    saved, policy = make_checkpoint()
    out = tmp_path / "model"
    out.mkdir()
    (out / "keep").touch()
    (saved / "config.json").write_text("{")
    with pytest.raises(ExportError, match="cannot be exported to"):
        export_model(saved, Path(policy.model), policy, out)
    assert [path.name for path in out.iterdir()] == ["keep"]
    assert not list(tmp_path.glob(".model*"))


async def test_a_run_that_is_done_leaves_its_model_and_one_that_is_drained_does_not(
    tmp_path: Path,
) -> None:
    calls: list[tuple[str, str]] = []

    def note(checkpoint: Path, out: Path) -> None:
        calls.append((checkpoint.name, str(out)))

    await train(tmp_path, None, steps=3, export=note)
    assert calls == [("step-000003", str(tmp_path / "run" / "model"))]
    calls.clear()
    await train(tmp_path, None, FakeRanks(tmp_path / "weights"), steps=5, export=note)
    assert [name for name, _ in calls] == ["step-000005"]
    calls.clear()
    async with learner(tmp_path, make_config(tmp_path, steps=7), export=note) as running:
        running.runtime.drain.set()
        await asyncio.wait_for(running.task, 20)
    assert calls == []


async def write_run(folder: Path, make_checkpoint: MakeCheckpoint) -> Path:
    """A run's folder with checkpoints of a real model at steps 5 and 7."""
    saved, policy = make_checkpoint()
    run_dir = folder / "run"
    machine = UploadingMachine(run_dir, store=None)  # pyright: ignore[reportArgumentType]
    for step in (5, 7):
        row = await machine.make(step)
        shutil.rmtree(row.directory)
        shutil.copytree(saved, row.directory)
        files = {
            path.name: FileEntry(sha256_of(path), path.stat().st_size) for path in saved.iterdir()
        }
        write_manifest(Path(row.directory), Manifest("run", 1, step, files))
    spec = {"name": "test", "policy": policy.model_dump(mode="json")}
    (run_dir / "spec.json").write_text(json.dumps(spec))
    return run_dir


async def test_the_command_exports_a_kept_checkpoint_and_refuses_others(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = await write_run(tmp_path, make_checkpoint)
    assert query(run_dir, "SELECT count(*) FROM checkpoints") == [(2,)]
    out = tmp_path / "out"
    assert command.main([str(run_dir), "--step", "5", "--out", str(out)]) == 0
    assert "Exported step 5 of run" in capsys.readouterr().out
    refusals = {
        ("--out", str(out)): "already exists",
        (
            "--out",
            str(tmp_path / "b"),
            "--step",
            "6",
        ): "step 6; it has those of 5, 7",
    }
    for arguments, why in refusals.items():
        assert command.main([str(run_dir), *arguments]) == 2
        assert why in capsys.readouterr().err
    (path,) = (run_dir / "checkpoints" / "step-000007").glob("*.safetensors")
    path.write_bytes(b"damaged")
    assert command.main([str(run_dir), "--out", str(tmp_path / "b")]) == 2
    assert f"{path.name} has 7 bytes instead of" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()
    (run_dir / JOURNAL_FILE).unlink()
    assert command.main([str(run_dir), "--out", str(tmp_path / "b")]) == 2
    assert "does not exist, so no checkpoint is known" in capsys.readouterr().err


def identify_served(name: str, runs: Path) -> str:
    """Identify what `flotilla eval --model` serves for a name, and is gone afterwards."""
    with find_model(name, runs) as served:
        assert load_file(Path(served) / "model.safetensors").keys()
        identity = identify_model(served)
    assert not Path(served).exists()
    return identity


async def test_eval_serves_what_the_command_exports_and_knows_it_again(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    run_dir = await write_run(tmp_path, make_checkpoint)
    assert command.main([str(run_dir), "--step", "5", "--out", str(tmp_path / "out")]) == 0
    # Both checkpoints are the same model here.
    known = [identify_served(name, tmp_path) for name in ("run@5", "run")]
    assert known == [identify_model(str(tmp_path / "out"))] * 2
    why = "the model of run@6 cannot be exported, see above"
    with pytest.raises(CommandError, match=why), find_model("run@6", tmp_path):
        pass


def test_shards_of_other_dtypes_stay_as_they_are(
    tmp_path: Path, make_checkpoint: MakeCheckpoint
) -> None:
    saved, policy = make_checkpoint(dtype="bfloat16")
    tensors = {"a": torch.arange(3), "b": torch.full((2, 2), 1 / 3), "c": torch.zeros(0)}
    for path in saved.glob("*.safetensors"):
        path.unlink()
    named = flatten_groups({MODEL: tensors})
    write_rank_files(saved, named, 0)
    write_record(saved, {name: tensor.shape for name, tensor in named.items()}, step=1)
    export_model(saved, Path(policy.model), policy, tmp_path / "model")
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(found["a"], tensors["a"])
    assert torch.equal(found["b"], tensors["b"].bfloat16())
    assert found["c"].shape == (0,)
    digest = hashlib.sha256((tmp_path / "model" / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (tmp_path / "model" / "SHA256SUMS").read_text()

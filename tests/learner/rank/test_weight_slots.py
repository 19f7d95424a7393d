import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flotilla_common.tensors.tensor_checksum import checksum64
from flotilla_common.weights import fingerprint as reference
from flotilla_learner.rank.model import Policy
from flotilla_learner.rank.weight_slots import SharedMemoryError, WeightSlots
from flotilla_learner.ranks.protocol import SLOT_COUNT
from tests.support.tiny_ranks import make_batch, make_trainer, parameters, same_bits


@given(st.integers(0, 400_000), st.integers(0, 2**32 - 1))
def test_the_checksum_is_that_of_the_numpy_reference(count: int, seed: int) -> None:
    data = np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)
    assert checksum64(torch.from_numpy(data.copy())) == reference.checksum64(data)


def test_the_checksum_of_bytes_that_start_at_an_odd_address() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1003, dtype=np.uint8)
    assert checksum64(torch.from_numpy(data)[3:]) == reference.checksum64(data[3:])


@given(st.lists(st.integers(0, 3_000), min_size=1, max_size=4), st.integers(0, 15))
def test_the_checksums_of_parts_add_up_to_that_of_the_whole(pairs: list[int], rest: int) -> None:
    data = np.random.default_rng(0).integers(0, 256, 16 * sum(pairs) + rest, dtype=np.uint8)
    starts = [16 * sum(pairs[:index]) for index in range(len(pairs) + 1)]
    parts = zip(starts, [*starts[1:], len(data)], strict=True)
    total = sum(checksum64(torch.from_numpy(data[start:end]), start) for start, end in parts)
    assert total % 2**64 == reference.checksum64(data)


@pytest.fixture(params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return getattr(torch, request.param)


def slots_of(policy: Policy, dtype: torch.dtype, folder: Path) -> WeightSlots:
    return WeightSlots(policy.named_parameters(), dtype, folder, "run")


def test_a_file_that_another_has_made_in_between_is_never_written_to(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, _, _ = make_trainer(model_folder)
    # As if it came after the predecessor's was removed.
    monkeypatch.setattr(Path, "unlink", lambda path, **_: path.write_text("theirs"))  # pyright: ignore[reportUnknownLambdaType, reportUnknownMemberType, reportUnknownArgumentType]
    with pytest.raises(FileExistsError):
        slots_of(policy, torch.float32, tmp_path)
    [theirs] = tmp_path.iterdir()
    assert theirs.read_text() == "theirs"


def test_a_publication_is_a_safetensors_file_with_a_true_manifest(
    model_folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    policy, _, _ = make_trainer(model_folder)
    slots = slots_of(policy, dtype, tmp_path)
    path, fingerprint, manifest = slots.write_version(0)
    expected = {name: value.to(dtype) for name, value in parameters(policy).items()}
    assert same_bits(load_file(path), expected)
    raw = np.fromfile(path, np.uint8)
    assert raw.size == slots.total_bytes
    for entry in manifest:
        size = expected[entry.name].numel() * dtype.itemsize
        part = raw[entry.offset_bytes : entry.offset_bytes + size]
        assert reference.checksum64(part) == entry.checksum
        assert (entry.dtype, entry.shape) == (
            str(dtype).removeprefix("torch."),
            tuple(expected[entry.name].shape),
        )
    assert reference.compute_fingerprint(manifest, slots.total_bytes) == fingerprint


def test_the_newest_two_versions_stay_readable(model_folder: Path, tmp_path: Path) -> None:
    policy, _, trainer = make_trainer(model_folder)
    slots = slots_of(policy, torch.float32, tmp_path)
    written: list[tuple[Path, dict[str, torch.Tensor]]] = []
    for version in range(4):
        if version:
            trainer.train_step(make_batch(step=version), lr=1e-2)
        written.append((slots.write_version(version)[0], parameters(policy)))
        for path, values in written[-2:]:
            assert same_bits(load_file(path), values)
    assert len({path for path, _ in written}) == SLOT_COUNT
    assert len({str(values) for _, values in written}) == 4


def test_equal_weights_have_equal_fingerprints_and_others_do_not(
    model_folder: Path, tmp_path: Path
) -> None:
    policy, _, _ = make_trainer(model_folder)
    slots = slots_of(policy, torch.float32, tmp_path)
    assert slots.write_version(0)[1] == slots.write_version(1)[1]
    before = slots.write_version(1)[1]
    with torch.no_grad():
        next(iter(policy.named_parameters().values()))[0, 0] += 1e-3
    assert slots.write_version(2)[1] != before


def test_an_engine_can_load_the_file_as_the_models_weights(
    model_folder: Path, tmp_path: Path
) -> None:
    policy, _, trainer = make_trainer(model_folder)
    trainer.train_step(make_batch(), lr=1e-2)
    slots = slots_of(policy, torch.float32, tmp_path)
    path, _, _ = slots.write_version(1)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    model.load_state_dict(load_file(path), strict=False)
    assert same_bits(dict(model.named_parameters()), parameters(policy))
    slots.unlink_slots()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_ends_late_leaves_its_successors_slots_alone(
    model_folder: Path, tmp_path: Path
) -> None:
    policy, _, _ = make_trainer(model_folder)
    late = slots_of(policy, torch.float32, tmp_path)
    for path in late.paths:
        path.unlink()
    successor = slots_of(policy, torch.float32, tmp_path)
    late.unlink_slots()
    assert all(path.exists() for path in successor.paths)


def test_too_little_shared_memory_is_an_error_that_names_the_need(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    policy, _, _ = make_trainer(model_folder)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryError, match=r"no room for 3 publications of .* --shm-size"):
        slots_of(policy, torch.float32, tmp_path)
    assert list(tmp_path.iterdir()) == []

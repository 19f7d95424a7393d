"""Models and checkpoints that are refused before anything of them is loaded."""

import json
import pickle
import resource
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.journal_file import JOURNAL_FILE, JournalError
from flotilla_common.spec.config import parse_config
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.checkpoints.model_file_checks import check_model_files
from flotilla_learner.checkpoints.tensor_files import TensorFileError, check_dtype, read_header
from flotilla_learner.journal.store import open_journal
from flotilla_learner.run_files.checkpoint_manifest import (
    DamagedCheckpointError,
    ForeignCheckpointError,
    parse_manifest,
)
from tests.support.remote_checkpoints import query

CONFIG = {"model_type": "qwen3", "hidden_size": 8, "vocab_size": 64, "tie_word_embeddings": True}


class Harmful:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return (open, ("/tmp/harmful-was-here", "w"))


def model_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    save_file({"a": np.zeros((2, 3), np.float32)}, folder / "model.safetensors")
    return folder


def policy(folder: Path) -> PolicyConfig:
    return parse_config(PolicyConfig, {"model": str(folder), "max_model_len": 8}, where="test")


def test_a_whole_model_passes(tmp_path: Path) -> None:
    check_model_files(policy(model_folder(tmp_path / "m")), tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pkl"])
def test_b56_a_model_that_is_a_pickle_is_refused_and_not_loaded(tmp_path: Path, name: str) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Harmful()))
    with pytest.raises(ConfigError, match=rf"has its weights as {name}, a pickle"):
        check_model_files(policy(folder), tmp_path)
    assert not Path("/tmp/harmful-was-here").exists()


def test_b56_a_pickle_under_the_name_of_safetensors_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(pickle.dumps(Harmful()) * 50)
    with pytest.raises(ConfigError, match="not safetensors"):
        check_model_files(policy(folder), tmp_path)
    assert not Path("/tmp/harmful-was-here").exists()


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors"):
        check_model_files(policy(folder), tmp_path)


def tensor_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "F32", shape: Any = None) -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("length", [2 << 30, 2**63, 2**64 - 1])
def test_b57_a_header_of_gigabytes_is_refused_without_reading_it(
    tmp_path: Path, length: int
) -> None:
    path = tensor_file(tmp_path / "m.safetensors", {}, length=length)
    # As large as the header claims to be, where a disk can hold the hole.
    with path.open("r+b") as file:
        file.truncate(min(length, 3 << 30))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    with pytest.raises(TensorFileError, match=f"its header claims {length} bytes"):
        read_header(path)
    assert time.monotonic() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10_000


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, b"x" * 12, "b overlaps the tensor before it"),
        ({"a": entry(0, 8), "b": entry(0, 8)}, b"x" * 8, "overlaps the tensor before it"),
        ({"a": entry(0, 8), "b": entry(12, 16)}, b"x" * 16, "b leaves a gap before it"),
        ({"a": entry(0, 8)}, b"x" * 4, "its tensors end at byte"),
        ({"a": entry(0, 8)}, b"x" * 12, "its tensors end at byte"),
        ({"a": entry(0, 8, "F16")}, b"x" * 8, r"a has 8 bytes, but F16 of shape \[2\] has 4"),
        ({"a": entry(0, 8, "F32", [2**62, 4])}, b"x" * 8, "a has 8 bytes, but F32"),
        ({"a": entry(0, 8, "F99")}, b"x" * 8, "dtype 'F99'"),
        ({"a": entry(0, 8, "F32", [-2])}, b"x" * 8, "shape"),
        ({"a": entry(8, 0, "F32", [0])}, b"x" * 8, "a has -8 bytes"),
        ({"a": entry(0, 8, "F32", [True, 2])}, b"x" * 8, "shape"),
        ({"a": {"dtype": "F32"}}, b"", "not an entry of a header"),
        ({"a": []}, b"", "not an entry of a header"),
        ([], b"", "its header is not a JSON object"),
        (b"\xff\xfe", b"", "its header is not JSON"),
        (b'{"a":' * 9_999, b"", "its header is not JSON"),
        (b"", b"", "its header is not JSON"),
    ],
)
def test_b57_a_header_that_lies_is_refused(
    tmp_path: Path, header: Any, data: bytes, why: str
) -> None:
    path = tensor_file(tmp_path / "m.safetensors", header, data)
    with pytest.raises(TensorFileError, match=why):
        read_header(path)
    folder = model_folder(tmp_path / "m")
    path.rename(folder / "model.safetensors")
    with pytest.raises(ConfigError, match="fetch the model again"):
        check_model_files(policy(folder), tmp_path)


def test_b57_a_file_of_seven_bytes_or_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    for data in (b"", b"1234567"):
        path.write_bytes(data)
        with pytest.raises(TensorFileError, match="not safetensors"):
            read_header(path)
    with pytest.raises(TensorFileError, match="cannot be read"):
        read_header(tmp_path / "gone.safetensors")


def test_b57_weights_of_another_dtype_than_a_checkpoints_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"a": np.zeros(3, np.float32), "n": np.zeros(3, np.int64)}, path)
    check_dtype(path, "F32")
    save_file({"a": np.zeros(3, np.float16)}, path)
    with pytest.raises(TensorFileError, match="a is F16, expected F32"):
        check_dtype(path, "F32")


def test_what_safetensors_writes_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    arrays = {"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.zeros(0, np.int8)}
    save_file(arrays, path, metadata={"format": "pt"})
    spans = read_header(path)
    raw = path.read_bytes()
    assert {name: span.shape for name, span in spans.items()} == {"a": (0,), "b": (2, 3)}
    assert raw[spans["b"].begin : spans["b"].end] == arrays["b"].tobytes()


@pytest.mark.parametrize(
    "names", [["../../etc/passwd"], ["model-00001.safetensors"], ["pytorch_model.bin"], [None]]
)
def test_an_index_that_names_what_is_no_shard_of_the_folder_is_refused(
    tmp_path: Path, names: list[Any]
) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "pytorch_model.bin").touch()
    weight_map = {f"w{number}": name for number, name in enumerate(names)}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match="which is not a weight file"):
        check_model_files(policy(folder), tmp_path)
    for text in ("[]", "{}", '{"weight_map": []}', "no json"):
        path.write_text(text)
        with pytest.raises(ConfigError, match=r"index\.json"):
            check_model_files(policy(folder), tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_size", 16), ("model_type", "llama"), ("vocab_size", 65)]
)
def test_b58_another_model_than_that_of_the_runs_checkpoints_is_refused(
    tmp_path: Path, name: str, value: Any
) -> None:
    run_dir = tmp_path / "run"
    saved = run_dir / "checkpoints" / "step-000010"
    saved.mkdir(parents=True)
    (saved / "config.json").write_text(json.dumps(CONFIG))
    check_model_files(policy(model_folder(tmp_path / "same")), run_dir)
    other = model_folder(tmp_path / "other", **{name: value})
    with pytest.raises(ConfigError, match=f"another model than this run trains: its {name} is"):
        check_model_files(policy(other), run_dir)


def test_another_text_part_than_that_of_the_runs_checkpoints_is_refused(tmp_path: Path) -> None:
    whole = {"model_type": "qwen3_vl", "vision_config": {"depth": 2}}
    saved = tmp_path / "run/checkpoints/step-000001"
    folder = tmp_path / "model"
    for place, width in ((saved, 8), (folder, 16)):
        place.mkdir(parents=True)
        settings = {**whole, "text_config": {"hidden_size": width}}
        (place / "config.json").write_text(json.dumps(settings))
    save_file({"w": np.zeros(2, np.float32)}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="its hidden_size is 16"):
        check_model_files(policy(folder), tmp_path / "run")


def test_a_model_that_cannot_be_trained_on_text_is_refused_before_it_is_loaded(
    tmp_path: Path,
) -> None:
    settings = {"model_type": "llava", "vision_config": {"depth": 2}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file({"w": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="'llava'"):
        check_model_files(policy(tmp_path), tmp_path / "run")


async def test_b58_a_journal_of_a_newer_schema_is_refused_and_left_as_it_is(
    tmp_path: Path,
) -> None:
    journal = open_journal(tmp_path)
    await journal.set_meta({"schema_version": 99})
    await journal.close()
    before = (tmp_path / JOURNAL_FILE).read_bytes()
    with pytest.raises(JournalError, match=r"has format 99, but flotilla .* reads"):
        open_journal(tmp_path)
    assert query(tmp_path, "SELECT value FROM meta WHERE key = 'schema_version'") == [("99",)]
    assert (tmp_path / JOURNAL_FILE).read_bytes() == before


def test_b58_a_checkpoint_of_a_newer_format_is_foreign_and_a_torn_one_damaged() -> None:
    with pytest.raises(ForeignCheckpointError, match="has format 99"):
        parse_manifest('{"format": 99}', "manifest.json")
    for text in ("{", "[]", "null", '{"format": 2}', '{"format": 2, "files": {"a": {}}}'):
        with pytest.raises(DamagedCheckpointError):
            parse_manifest(text, "manifest.json")

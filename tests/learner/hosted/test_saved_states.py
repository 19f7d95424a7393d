import json
from pathlib import Path

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.checkpoints import export_command
from flotilla_learner.hosted.saved_states import HostedState, read_state, write_state
from flotilla_learner.journal.schema import CheckpointRow
from flotilla_learner.journal.store import open_journal
from flotilla_learner.run_files.checkpoint_manifest import FileEntry, Manifest, write_manifest

STATE = HostedState("tinker://s:train:0/weights/step-000004", "Qwen/Qwen3-8B", 16, 4, 12_345)


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    files = write_state(tmp_path / "step", STATE)
    assert list(files.sha256) == ["tinker.json"]
    assert read_state(tmp_path / "step", "Qwen/Qwen3-8B", 16) == STATE


@pytest.mark.parametrize(
    ("model", "rank", "message"),
    [
        (
            "Qwen/Qwen3-4B",
            16,
            r"policy\.tinker\.model: Qwen/Qwen3-4B, but the run trains Qwen/Qwen3-8B",
        ),
        ("Qwen/Qwen3-8B", 8, r"learner\.lora\.rank: 8, but the run trains 16"),
    ],
)
def test_a_state_of_another_model_is_refused(
    tmp_path: Path, model: str, rank: int, message: str
) -> None:
    write_state(tmp_path, STATE)
    with pytest.raises(ConfigError, match=message):
        read_state(tmp_path, model, rank)


def test_a_state_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "tinker.json").write_text('{"address": 1}')
    with pytest.raises(ConfigError, match=r"tinker\.json cannot be read"):
        read_state(tmp_path, "m", 1)


async def test_an_export_says_where_the_weights_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = open_journal(tmp_path)
    folder = tmp_path / "checkpoints" / "step-000004"
    files = write_state(folder, STATE)
    entries = {
        name: FileEntry(digest, (folder / name).stat().st_size)
        for name, digest in files.sha256.items()
    }
    write_manifest(folder, Manifest(tmp_path.name, 1, 4, entries))
    spec = {"name": "x", "policy": {"model": "m", "max_model_len": 64}}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    try:
        row = CheckpointRow(4, str(folder), dict(files.sha256))
        await journal.commit_checkpoint(row, 1, lambda: None)
    finally:
        await journal.close()
    assert export_command.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert f"`tinker checkpoint download {STATE.address}`" in capsys.readouterr().err

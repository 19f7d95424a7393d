"""Runs of one machine keep out of each other's shared memory."""

from pathlib import Path

from services.common.shared_memory import SHARED_MEMORY, shared_name
from services.launcher.adapters.local import LocalBackend


def test_one_id_in_two_folders_has_two_names(tmp_path: Path) -> None:
    assert shared_name("run", tmp_path / "a" / "run") != shared_name("run", tmp_path / "b" / "run")


def test_a_folder_has_one_name_however_it_is_written(tmp_path: Path) -> None:
    crooked = tmp_path / "x" / ".." / "run"
    assert shared_name("run", crooked) == shared_name("run", tmp_path / "run")


async def test_what_a_run_left_is_removed_and_no_more(tmp_path: Path) -> None:
    folders = {
        "own": tmp_path / "a" / "run",
        "of the same id": tmp_path / "b" / "run",
        "of an id that begins alike": tmp_path / "a" / "run-2",
    }
    files = {
        whose: SHARED_MEMORY / f"{shared_name(folder.name, folder)}-slot0.safetensors"
        for whose, folder in folders.items()
    }
    for file in files.values():
        file.touch()
    try:
        await LocalBackend(tmp_path / "a").clean("run")
        assert {whose for whose, file in files.items() if not file.exists()} == {"own"}
    finally:
        for file in files.values():
            file.unlink(missing_ok=True)

"""Files of a process are private to its user, and none leaves its memory on a disk."""

import os
import shlex
import stat
import sys
from pathlib import Path

import pytest

from flotilla_common.process.private_process import keep_private
from tests.common.process.test_service_main import SPEC
from tests.support import echo_service

SERVICE = (sys.executable, "-m", "tests.common.sample_service")


def ended(folder: Path, *command: str) -> int:
    """The status that a command ends with in `folder`, started by a user who lets others read his
    files and wants core dumps."""
    script = f"umask 022; ulimit -c unlimited; cd {folder}; exec {shlex.join(command)}"
    environ = {**os.environ, "FLOTILLA_TOKEN": echo_service.TOKEN}
    child = os.posix_spawn("/bin/sh", ["sh", "-c", script], environ)
    return os.waitpid(child, 0)[1]


@pytest.fixture
def crashed(tmp_path: Path) -> tuple[Path, int]:
    """The folder of a run whose service has crashed in it, and the status of the process."""
    (tmp_path / "spec.toml").write_text(SPEC)
    paths = ("--config", str(tmp_path / "spec.toml"), "--run-dir", str(tmp_path / "run"))
    return tmp_path / "run", ended(tmp_path, *SERVICE, *paths, "--rollout.mode=crash")


def test_a_service_started_by_hand_makes_files_for_its_user_alone(
    crashed: tuple[Path, int],
) -> None:
    folder, _ = crashed
    paths = [folder, *folder.rglob("*")]
    assert {path.name for path in paths} >= {"run", "journal", "environment"}
    open_ones = [str(path) for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077]
    assert open_ones == []


def test_a_crash_writes_no_core_dump_though_the_user_wants_them(
    tmp_path: Path, crashed: tuple[Path, int]
) -> None:
    folder, status = crashed
    assert os.WIFSIGNALED(status), "it crashed"
    assert not os.WCOREDUMP(status)
    assert list(folder.glob("*core*")) == []
    if not os.WCOREDUMP(ended(tmp_path, sys.executable, "-c", "import os; os.abort()")):
        pytest.skip("this machine writes no core dumps at all")


def test_what_a_service_starts_finds_no_token_of_the_run_in_its_environment(
    crashed: tuple[Path, int],
) -> None:
    folder, _ = crashed
    output = (folder / "environment").read_text()
    assert "PATH" in output and echo_service.TOKEN not in output


def test_a_limit_that_forbids_dumps_altogether_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[object] = []
    monkeypatch.setattr("resource.getrlimit", lambda kind: (0, 0))
    monkeypatch.setattr("resource.setrlimit", lambda *given: requests.append(given))
    before = os.umask(0o022)
    try:
        keep_private()
    finally:
        assert os.umask(before) == 0o077
    assert requests == []

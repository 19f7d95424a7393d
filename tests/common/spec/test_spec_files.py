"""Files that a spec names beside itself are found from wherever a command is given."""

import os
from pathlib import Path

import pytest

from services.common.spec.spec_loading import load_spec

SPEC = """
[env_gateway.verifiers]
digests = "own.sha256"
[env_gateway.environments.notes]
verifier = "notes.py"
"""


def write(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    path = folder / "run.toml"
    path.write_text(SPEC)
    return path


def named(path: Path, *overrides: str) -> tuple[str, str]:
    gateway = load_spec(path, overrides)["env_gateway"]
    return gateway["verifiers"]["digests"], gateway["environments"]["notes"]["verifier"]


def test_a_file_beside_the_spec_is_named_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "mine", "own.sha256", "notes.py")
    monkeypatch.chdir(tmp_path)
    assert named(path) == ("mine/own.sha256", "mine/notes.py")
    assert named(Path("mine/run.toml")) == ("mine/own.sha256", "mine/notes.py")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert named(path) == (f"{tmp_path}/mine/own.sha256", f"{tmp_path}/mine/notes.py")


def test_what_is_not_beside_the_spec_counts_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "mine", "own.sha256")
    assert named(path) == ("mine/own.sha256", "notes.py")
    # As the launcher writes it down, in a folder of its own.
    stored = tmp_path / "runs/mine-1/spec.json"
    stored.parent.mkdir(parents=True)
    stored.write_text('{"env_gateway": {"verifiers": {"digests": "mine/own.sha256"}}}')
    assert load_spec(stored)["env_gateway"]["verifiers"]["digests"] == "mine/own.sha256"


def test_an_override_counts_from_the_working_directory_as_in_any_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "mine", "own.sha256", "notes.py", "other.sha256")
    monkeypatch.chdir(tmp_path)
    given = "--env_gateway.verifiers.digests=other.sha256"
    assert named(path, given)[0] == "other.sha256"
    assert not os.path.exists("other.sha256")


def test_a_chat_template_is_named_from_the_working_directory_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/own.jinja").touch()
    (tmp_path / "mine/run.toml").write_text(
        '[rollout.dialect]\nchat_template = "own.jinja"\n[rollout.engine]\nkind = "vllm"\n'
    )
    monkeypatch.chdir(tmp_path)
    found = load_spec(Path("mine/run.toml"))["rollout"]["dialect"]
    assert found == {"chat_template": "mine/own.jinja"}
    # The default names no file, and not the folder of the spec.
    given = ["--rollout.dialect.chat_template="]
    stored = tmp_path / "mine/run.json"
    stored.write_text('{"rollout": {"dialect": {"chat_template": ""}}}')
    assert load_spec(stored, given)["rollout"]["dialect"] == {"chat_template": ""}

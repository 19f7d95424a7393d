"""Files that a spec names beside itself are found from wherever a command is given."""

import os
from pathlib import Path

import pytest

from flotilla_common.spec.spec_files import named_files
from flotilla_common.spec.spec_loading import load_spec

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


def write_function(folder: Path, name: str) -> Path:
    (folder / "graders").mkdir(parents=True)
    (folder / "graders/__init__.py").touch()
    (folder / "graders/notes.py").touch()
    path = folder / "run.toml"
    path.write_text(f'[env_gateway.environments.notes]\nverifier = "{name}"\n')
    return path


def function_of(path: Path) -> str:
    return load_spec(path)["env_gateway"]["environments"]["notes"]["verifier"]


def test_a_function_of_a_module_beside_the_spec_gets_the_folder_before_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_function(tmp_path / "mine", "graders.notes:graded")
    assert function_of(path) == "mine/graders.notes:graded"
    (tmp_path / "mine/again.toml").write_text(
        path.read_text().replace("graders.notes", "mine/graders.notes")
    )
    assert function_of(tmp_path / "mine/again.toml") == "mine/graders.notes:graded"
    monkeypatch.chdir(tmp_path / "mine")
    assert function_of(Path("run.toml")) == "./graders.notes:graded"


@pytest.mark.parametrize("name", ["graders.absent:graded", "json:loads", "elsewhere/notes:graded"])
def test_a_function_of_another_module_keeps_its_name(tmp_path: Path, name: str) -> None:
    assert function_of(write_function(tmp_path / "mine", name)) == name


def test_a_folder_of_modules_counts_from_the_spec(tmp_path: Path) -> None:
    path = write_function(tmp_path / "mine", "graders/notes:graded")
    assert function_of(path) == f"{tmp_path}/mine/graders/notes:graded"


def test_a_function_is_no_input_file_of_a_rented_machine(tmp_path: Path) -> None:
    path = write_function(tmp_path / "mine", "graders.notes:graded")
    assert list(named_files(load_spec(path))) == []

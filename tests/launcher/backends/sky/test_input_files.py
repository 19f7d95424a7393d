"""Files that a spec names are copied with the code, whole and once, and no others are."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from flotilla_launcher.backends.sky.code_bundle import CodeError, pin_code
from flotilla_launcher.backends.sky.input_files import copy_inputs, key_by_input
from tests.support.run_specs import bare_spec

SPEC: dict[str, Any] = {
    "name": "tiny",
    "policy": {"model": "build/tiny-0"},
    "learner": {
        "tasks": "build/tasks/train.json",
        "select": {"checked": True, "checks": "build/tasks/checks.jsonl"},
        "eval": {"sets": [{"tasks": "build/tasks/heldout.json"}, {"tasks": "/data/far.json"}]},
    },
}


def made(root: Path) -> Path:
    """The output of `[[prepare]]`, beside files that no spec requests."""
    (root / "build/tasks").mkdir(parents=True)
    (root / "build/tiny-0").mkdir()
    (root / "build/tiny-0/config.json").write_text("{}")
    for name in ("train", "heldout", "other"):
        (root / f"build/tasks/{name}.json").write_text(name)
    (root / "build/tasks/checks.jsonl").write_text("checks")
    return root


def repository(root: Path) -> Path:
    made(root)
    (root / ".gitignore").write_text("/build/\n/runs/\n")
    who = ("-c", "user.name=t", "-c", "user.email=t@example.org")
    for words in (("init", "--quiet"), ("add", "."), (*who, "commit", "--quiet", "-m", "one")):
        subprocess.run(("git", "-C", str(root), *words), check=True)
    return root


def test_model_tasks_and_evaluation_sets_are_brought_and_nothing_else(tmp_path: Path) -> None:
    root, folder = made(tmp_path / "root"), tmp_path / "code"
    assert copy_inputs(SPEC, root, folder) == []
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {
        "build/tiny-0/config.json",
        "build/tasks/train.json",
        "build/tasks/checks.jsonl",
        "build/tasks/heldout.json",
    }


@pytest.mark.parametrize("table", ["sft", "warm_start"])
def test_the_demonstrations_that_a_run_imitates_are_brought(table: str) -> None:
    name = "runs/demonstrations/run-0.npz"
    found = key_by_input({"name": "tiny", "learner": {table: {"data": name}}})
    assert found == {name: f"learner.{table}.data"}


def test_what_the_run_began_with_stays(tmp_path: Path) -> None:
    root, folder = made(tmp_path / "root"), tmp_path / "code"
    copy_inputs(SPEC, root, folder)
    (root / "build/tasks/train.json").write_text("made again")
    copy_inputs(SPEC, root, folder)
    assert (folder / "build/tasks/train.json").read_text() == "train"


def test_a_copy_that_was_cut_off_is_made_again(tmp_path: Path) -> None:
    root, folder = made(tmp_path / "root"), tmp_path / "code"
    (folder / "build/.tiny-0.draft").mkdir(parents=True)
    (folder / "build/.tiny-0.draft/half").touch()
    copy_inputs(SPEC, root, folder)
    assert [path.name for path in (folder / "build/tiny-0").iterdir()] == ["config.json"]


@pytest.mark.parametrize("model", ["Qwen/Qwen3-8B", "/models/own", "../elsewhere"])
def test_a_hub_id_and_a_path_outside_are_not_brought(tmp_path: Path, model: str) -> None:
    spec = {"policy": {"model": model}}
    assert copy_inputs(spec, tmp_path, tmp_path / "code") == [*key_by_input(spec)]
    assert not (tmp_path / "code").exists()


def test_a_spec_without_the_tables_names_nothing() -> None:
    assert key_by_input({}) == {}


def test_machines_get_them_beside_the_code_although_git_ignores_them(tmp_path: Path) -> None:
    root = repository(tmp_path / "root")
    code = pin_code(tmp_path / "runs/run-1", root, bare_spec(SPEC))
    assert (code / "build/tasks/train.json").read_text() == "train"
    assert (code / ".gitignore").exists()
    assert (code / ".skyignore").read_text() == ""


@pytest.mark.parametrize(
    ("lost", "key"),
    [
        ("build/tasks/train.json", "learner.tasks"),
        ("build/tasks/heldout.json", "learner.eval.sets.0.tasks"),
        ("build/tiny-0", "policy.model"),
    ],
)
def test_a_missing_file_is_refused_by_its_key_before_a_machine_is_requested(
    tmp_path: Path, lost: str, key: str
) -> None:
    root = repository(tmp_path / "root")
    (root / lost).rename(tmp_path / "lost")
    with pytest.raises(CodeError, match=rf"^{key}: .*{lost} is not there\n.*\[\[prepare\]\]"):
        pin_code(tmp_path / "runs/run-1", root, bare_spec(SPEC))


@pytest.mark.parametrize(
    ("model", "prepared", "refused"),
    [
        ("Qwen/Qwen3-8B", "", False),
        ("gpt2", "", False),
        ("/models/own", "", False),
        ("made/tiny-0", "made/tiny-0", True),
        ("./tiny-0", "", True),
        ("build/tasks/tiny-0", "", True),
        ("tiny-0", "tiny-0", True),
    ],
)
def test_a_model_that_is_not_there_is_refused_unless_it_may_be_one_of_the_hub(
    tmp_path: Path, model: str, prepared: str, refused: bool
) -> None:
    root = repository(tmp_path / "root")
    wish: dict[str, Any] = {"policy": {"model": model}}
    if prepared:
        wish["prepare"] = [{"creates": prepared, "command": ["true"]}]
    if not refused:
        pin_code(tmp_path / "runs/run-1", root, bare_spec(wish))
        return
    with pytest.raises(CodeError, match=r"^policy\.model: "):
        pin_code(tmp_path / "runs/run-1", root, bare_spec(wish))


def test_tasks_at_a_url_are_fetched_by_the_machines(tmp_path: Path) -> None:
    root = repository(tmp_path / "root")
    wish = {"learner": {"tasks": "s3://bucket/train.json"}}
    code = pin_code(tmp_path / "runs/run-1", root, bare_spec(wish))
    assert key_by_input(wish) == {} and code.is_dir()


def test_verifiers_and_the_list_of_them_are_brought_too(tmp_path: Path) -> None:
    root, folder = made(tmp_path / "root"), tmp_path / "code"
    (root / "own").mkdir()
    for name in ("own/list.sha256", "own/notes.py"):
        (root / name).touch()
    gateway = {
        "verifiers": {"digests": "own/list.sha256"},
        "environments": {"notes": {"verifier": "own/notes.py"}, "shop": {}},
    }
    assert copy_inputs({**SPEC, "env_gateway": gateway}, root, folder) == []
    assert (folder / "own/list.sha256").exists() and (folder / "own/notes.py").exists()


def test_a_chat_template_is_brought_and_its_default_is_not(tmp_path: Path) -> None:
    root, folder = made(tmp_path / "root"), tmp_path / "code"
    (root / "own.jinja").write_text("{{ messages }}")
    spec = {**SPEC, "rollout": {"dialect": {"chat_template": "own.jinja"}}}
    assert key_by_input(spec)["own.jinja"] == "rollout.dialect.chat_template"
    assert copy_inputs(spec, root, folder) == []
    assert (folder / "own.jinja").read_text() == "{{ messages }}"
    plain = {**SPEC, "rollout": {"dialect": {"chat_template": ""}}}
    assert key_by_input(plain) == key_by_input(SPEC)

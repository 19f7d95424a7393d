"""Names of modules before each service was a package of its own."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.spec.old_names import explain_old_import, find_new_name, translate_names
from flotilla_common.spec.spec_loading import expand_spec, load_spec
from tests.support.repository import ROOT

PYTHON = ("python", "-P", "-m")
# In the words of the last commit that had the old names.
OLD_TINY = "python -P -m tools.tiny_policy"
OLD: dict[str, Any] = {
    "name": "old",
    "policy": {"model": "m", "max_model_len": 8},
    "prepare": [
        {
            "creates": "build/tiny",
            "command": [*OLD_TINY.split(), "build", "--out", "build/tiny"],
            "needs": [
                "tools/tiny_policy/*.py",
                "environments/**/*.py",
                "services/common/domain/*.py",
                "services/wire/*.py",
                "notes",
                "notes.toml",
            ],
        },
        {"creates": "data", "command": [*PYTHON, "services.launcher.cli.app", "data", "prepare"]},
    ],
    "env_gateway": {
        "servers": [
            {"command": [*PYTHON, "environments.serve", "--port", "0"]},
            {"command": ["/opt/python", "-m", "environments.serve"]},
        ],
        "backends": {"fleet": {"command": [*PYTHON, "environments.fleet_emulator"]}},
        "environments": {"questions": {"verifier": "environments.tasks:make_task"}},
        "verifiers": {
            "trusted": ["environments"],
            "digests": "environments/verifiers.sha256",
        },
    },
    "launcher": {"modules": {"learner": "services.learner", "rollout": "mine.rollout"}},
    "learner": {"algorithm": {"plugins": ["services.learner.algo.losses"]}},
}


def test_a_spec_with_old_names_becomes_one_with_todays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    spec, renamed = translate_names(OLD)
    tiny, data = spec["prepare"]
    assert tiny["command"] == ["flotilla", "tiny", "build", "--out", "build/tiny"]
    assert tiny["needs"] == [
        "package:flotilla_environments",
        "package:flotilla_common.domain",
        "package:flotilla_common.wire",
        "notes",
        "notes.toml",
    ]
    assert data["command"] == ["flotilla", "data", "prepare"]
    gateway = spec["env_gateway"]
    assert gateway["servers"][0]["command"] == ["flotilla", "env", "serve", "--port", "0"]
    assert gateway["servers"][1]["command"] == ["/opt/python", "-m", "flotilla_environments.serve"]
    assert gateway["backends"]["fleet"]["command"] == ["flotilla", "emulator"]
    graded = gateway["environments"]["questions"]["verifier"]
    assert graded == "flotilla_environments.tasks:make_task"
    assert gateway["verifiers"] == {
        "trusted": ["flotilla_environments"],
        "digests": "environments/flotilla_environments/verifiers.sha256",
    }
    modules = {"learner": "flotilla_learner", "rollout": "mine.rollout"}
    assert spec["launcher"]["modules"] == modules
    assert spec["learner"]["algorithm"]["plugins"] == ["flotilla_learner.algo.losses"]
    assert renamed[OLD_TINY] == "flotilla tiny"
    assert len(renamed) == 14
    assert translate_names(spec) == (spec, {})


def test_a_users_file_is_loaded_with_one_line_that_names_the_new_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"prepare": [{"command": ["python", "-m", "environments.tasks"]}]}))
    for _ in range(2):
        assert load_spec(path)["prepare"][0]["command"] == ["flotilla", "tasks"]
    told = capsys.readouterr().err
    assert told == (f"warning: {path}: `python -m environments.tasks` is `flotilla tasks` now\n")


def test_a_runs_own_spec_is_translated_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    spec = expand_spec({**OLD, "written_by": {"version": "0", "commit": ""}}, where="spec")
    assert spec["launcher"]["modules"]["learner"] == "flotilla_learner"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("file", ["serve.py", "serve/__init__.py", "serve/__main__.py"])
def test_a_users_own_module_of_such_a_name_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    assert find_new_name("environments.serve")
    own = tmp_path / "environments" / file
    own.parent.mkdir(parents=True)
    own.write_text("raise SystemExit('nothing imports it')")
    with monkeypatch.context() as here:
        here.chdir(tmp_path)
        assert not find_new_name("environments.serve")
        assert find_new_name("environments.tasks"), "they have none of this name"
    monkeypatch.syspath_prepend(tmp_path)
    assert not find_new_name("environments.serve")


@pytest.mark.parametrize("name", ["environments.mine", "services.mine", "tools.requirements", "x"])
def test_a_name_that_flotilla_never_had_is_left_alone(name: str) -> None:
    assert not find_new_name(name)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "from services.learner.algo.advantages import within_groups",
            "services.learner.algo.advantages is flotilla_learner.algo.advantages now; plugins"
            " import from flotilla_learner.plugins",
        ),
        ("import environments.api", "environments.api is flotilla_environments.api now"),
        ("from environments import api", "environments is flotilla_environments now"),
        (
            "from services.wire.registry import load_registry",
            "services.wire.registry is flotilla_common.wire.registry now",
        ),
        ("import tools.mine", ""),
        ("import environments.mine", ""),
    ],
)
def test_a_failed_import_of_an_old_name_is_explained(line: str, told: str) -> None:
    top = line.split()[1].partition(".")[0]
    text = f"  File 'x.py', line 1\n    {line}\nModuleNotFoundError: No module named '{top}'"
    assert explain_old_import(text) == told
    assert explain_old_import(text.replace(f"'{top}'", "'numpy'")) == ""


# The tables of the demo's spec that named modules, as a run of it was recorded.
DEMO: dict[str, Any] = {
    "prepare": [
        {
            "creates": "build/tiny-0",
            "command": [
                *(*OLD_TINY.split(), "build", "--seed", "0"),
                *("--out", "build/tiny-0"),
            ],
            "message": "Building the tiny policy (one to three minutes, once per seed)",
            "needs": [
                "tools/tiny_policy/*.py",
                "environments/**/*.py",
                "services/common/domain/*.py",
                "services/rollout/dialects/*.py",
            ],
        },
        *(
            {
                "creates": f"build/tasks/{split}.json",
                "command": [
                    *(*PYTHON, "environments.tasks", "--split", split, "--count", count),
                    *("--out", f"build/tasks/{split}.json"),
                ],
                "message": f"Generating {what}",
                "needs": ["environments/**/*.py"],
            }
            for split, count, what in (
                ("train", "1200", "training tasks"),
                ("heldout", "192", "held-out tasks"),
                ("unseen_names", "192", "tasks with names that training never shows"),
            )
        ),
    ],
    "servers": [{"command": [*PYTHON, "environments.serve"], "instances": True}],
    "fleet": {"command": [*PYTHON, "environments.fleet_emulator", "--die-with-parent"]},
}


def test_the_demo_as_it_was_recorded_differs_in_nothing_from_todays() -> None:
    today = load_spec(ROOT / "deploy/runs/local.toml")
    spec, _ = translate_names(DEMO)
    assert spec["prepare"] == today["prepare"]
    assert spec["servers"] == today["env_gateway"]["servers"]
    assert spec["fleet"] == today["env_gateway"]["backends"]["fleet"]

"""Tasks of an account at Fleet, as the emulator sends them."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.tasks.task_files import read_tasks
from flotilla_environments.tasks import make_tasks
from flotilla_reading.data.entries import DataError
from flotilla_reading.data.sources import Fetched, fetch_source
from tests.environments.fleet_emulator_process import emulating
from tests.support.http_answers import serve_answers

KEY = "secret-of-the-account"


def fetch(source: str = "fleet:") -> Fetched:
    return fetch_source(source, lambda *_: None)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, Any]:
    tasks = {task["key"]: task for task in make_tasks(("booking", "tracker", "shop"), "train", 60)}
    (tmp_path / "given.json").write_text(json.dumps({"tasks": list(tasks.values())}))
    return tasks


def test_what_fleet_has_comes_back_as_the_tasks_that_it_was_given(
    tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEET_API_KEY", KEY)
    with emulating("--tasks", str(tmp_path / "given.json")) as url:
        monkeypatch.setenv("FLEET_BASE_URL", url)
        every, some = fetch(), fetch("fleet:shop, tracker")
    assert {row.key: row.fields for row in every.read_rows()} == given
    expected = [each.task for each in read_tasks(tmp_path / "given.json")]
    assert [row.task for row in every.read_rows()] == expected
    assert {row.env_key for row in some.read_rows()} == {"shop", "tracker"}
    about = some.to_dict()
    assert about["url"] == f"{url}/v1/tasks?env_key=shop&env_key=tracker"
    assert (about["kind"], len(about["sha256"])) == ("fleet", 64)


def test_a_wrong_key_a_missing_key_and_a_silent_host_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    with pytest.raises(DataError, match="FLEET_API_KEY is not set"):
        fetch()
    monkeypatch.setenv("FLEET_API_KEY", KEY)
    with emulating(FLOTILLA_ENV_TOKEN="another") as url:
        monkeypatch.setenv("FLEET_BASE_URL", url)
        with pytest.raises(DataError, match=r"HTTP 401 .*; check FLEET_API_KEY") as wrong:
            fetch()
    with pytest.raises(DataError, match=r"/v1/tasks: .*Connection refused") as silent:
        fetch()
    assert KEY not in f"{wrong.value}{silent.value}"
    monkeypatch.setenv("FLEET_BASE_URL", "file:///etc/passwd")
    with pytest.raises(DataError, match=r"FLEET_BASE_URL: .* is no address"):
        fetch()


@pytest.mark.parametrize("body", [b"", b"[]", b'{"tasks": 3}', b'{"tasks": [1]}', b"[" * 10**5])
def test_an_answer_that_holds_no_tasks_is_an_error(
    monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    monkeypatch.setenv("FLEET_API_KEY", KEY)
    with serve_answers(lambda _: (200, {}, body)) as url:
        monkeypatch.setenv("FLEET_BASE_URL", url)
        with pytest.raises(DataError, match="/v1/tasks: "):
            fetch()

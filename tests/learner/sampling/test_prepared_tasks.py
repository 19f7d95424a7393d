"""A run whose spec names a manifest trains on its tasks and on no others."""

import json
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flotilla_common.rpc.errors import ConfigError
from flotilla_launcher.cli.app import app
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.journal.store import Journal, open_journal
from flotilla_learner.run.resume_checks import check_data_are_the_same
from flotilla_learner.run.task_files import load_task_files
from tests.reading.data.made_tasks import make_row, make_rows
from tests.support.learner import make_config


def prepare(folder: Path, sizes: dict[str, int], *words: str) -> Path:
    source = folder.with_suffix(".json")
    source.write_text(json.dumps(make_rows(sizes)))
    done = CliRunner().invoke(app, ["data", "prepare", str(source), "--out", str(folder), *words])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return prepare(tmp_path / "data", {"shop": 60, "desk": 60})


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncGenerator[Journal]:
    opened = open_journal(tmp_path / "run")
    yield opened
    await opened.close()


def config_of(folder: Path, data: Path, *sets: Path, **changes: Any) -> LearnerConfig:
    paths = sets or (data / "eval.jsonl",)
    named = [{"name": f"set_{n}", "tasks": str(path)} for n, path in enumerate(paths)]
    tasks = {"tasks": str(data / "train.jsonl"), "data": str(data / "manifest.json")}
    return make_config(folder, **{**tasks, "eval": {"sets": named}, **changes})


def rewrite(path: Path, change: str, to: str) -> None:
    text = path.read_text()
    assert change in text
    path.write_text(text.replace(change, to, 1))


def test_prepared_tasks_are_taken_whichever_of_them_are_selected(
    tmp_path: Path, data: Path
) -> None:
    others = tmp_path / "others.json"
    others.write_text(json.dumps([make_row(f"other-{n}") for n in range(3)]))
    select = {"env_keys": ["shop"], "tools": {"shop": ["buy"]}, "max_tasks": 5}
    config = config_of(tmp_path, data, data / "eval.jsonl", others, select=select)
    tasks, sets = load_task_files(config, 0, sees_pictures=True)
    assert len(tasks) == 5
    assert [len(each.tasks) for each in sets] == [6, 3]


def test_a_task_that_was_changed_added_or_moved_is_refused(tmp_path: Path, data: Path) -> None:
    train, held = data / "train.jsonl", data / "eval.jsonl"
    first, asked = (json.loads(path.read_text().splitlines()[0])["key"] for path in (train, held))
    cases = (
        (train, f"Do {first}.", f"Do {first} twice.", f"'{first}' first, which was changed since"),
        (train, f'"{first}"', '"new"', "'new' first, which is not in it"),
        (held, f"Do {asked}.", "Do all.", f"'{asked}' first, which was changed since"),
        (held, f'"{asked}"', f'"{first}"', f"'{first}' first, which is one to train on"),
    )
    for path, change, to, message in cases:
        before = path.read_text()
        rewrite(path, change, to)
        with pytest.raises(ConfigError) as raised:
            load_task_files(config_of(tmp_path, data), 0, sees_pictures=True)
        assert f"learner.data: 1 tasks of {path} are not as" in str(raised.value)
        assert message in str(raised.value)
        assert "prepare the data again, or leave learner.data out" in str(raised.value)
        path.write_text(before)
    load_task_files(config_of(tmp_path, data), 0, sees_pictures=True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read .*`flotilla data prepare` writes one"),
        ("{}", "has format None, and this Flotilla reads 1"),
        ('{"format": 1}', "is no manifest of prepared data"),
        ('{"format": 1, "source": {}, "tasks": 7}', "is no manifest of prepared data"),
    ],
)
def test_a_file_that_is_no_manifest_is_refused(
    tmp_path: Path, data: Path, content: str | None, message: str
) -> None:
    (data / "manifest.json").unlink()
    if content is not None:
        (data / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_task_files(config_of(tmp_path, data), 0, sees_pictures=True)


async def test_a_resumed_run_goes_on_with_the_data_that_it_began_with(
    tmp_path: Path, data: Path, journal: Journal
) -> None:
    await check_data_are_the_same(journal, str(data / "manifest.json"))
    (recorded,) = [(await journal.read_meta())["began_with"]["data"]]
    assert recorded["tasks"] == {"train": 108, "eval": 12}
    assert recorded["source"]["url"].endswith("data.json")
    moved = tmp_path / "moved"
    os.rename(data, moved)
    await check_data_are_the_same(journal, str(moved / "manifest.json"))
    other = prepare(tmp_path / "other", {"shop": 60, "desk": 61})
    with pytest.raises(ConfigError) as raised:
        await check_data_are_the_same(journal, str(other / "manifest.json"))
    assert "109 to train, 12 to eval" in str(raised.value)
    assert "is not the manifest that this run started with (108 to train" in str(raised.value)

"""`flotilla data`, on real files."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from flotilla_common.spec.data_table import DataTable
from flotilla_launcher.cli import data_prepare
from flotilla_launcher.cli.app import app
from flotilla_learner.config.sampling import SelectConfig
from flotilla_learner.sampling.eval_sets import EvalSet, load_eval_set, refuse_trained_tasks
from flotilla_learner.sampling.tasks import load_tasks
from flotilla_reading.data.adapters import store_files
from tests.launcher.cli.test_app import run_cli
from tests.reading.data.made_tasks import make_row, make_rows
from tests.support.learner import make_config

RULE = {"key": "shop-0", "reason": "no solution", "date": "2026-11-28", "evidence": "run 7"}


def flotilla(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "300"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def source(folder: Path, rows: Sequence[Any], name: str = "tasks.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    return source(
        tmp_path,
        [
            *make_rows({"shop": 60, "desk": 20}),
            make_row("late", "desk", prompt="Do it tomorrow."),
            make_row("blank", prompt=""),
        ],
    )


async def test_a_source_is_split_counted_and_written_for_others(
    tmp_path: Path, tasks: Path
) -> None:
    rules = source(tmp_path, [RULE, {**RULE, "key": "nowhere"}], "rules.jsonl")
    out = tmp_path / "data"
    code, output = await run_cli(
        *("data", "prepare", str(tasks), "--out", str(out), "--quarantine", str(rules)),
        *("--held-out", "desk", "--max-eval", "15"),
    )
    assert code == 0, output
    lines = [line.split() for line in output.splitlines()]
    reasons = ["quarantined", "invalid", "relative_date", "over_max_eval"]
    assert lines[0] == ["environment", "source", "train", "eval", *reasons]
    assert lines[1:4] == [
        ["desk", "21", "0", "10", "0", "0", "1", "10"],
        ["shop", "61", "54", "5", "1", "1", "0", "0"],
        ["total", "82", "54", "15", "1", "1", "1", "10"],
    ]
    assert "invalid: needs a non-empty string 'prompt': 1, for instance line 82 (blank)" in output
    assert "relative_date: the prompt says 'tomorrow', and CURRENT_DATE is missing" in output
    assert "quarantine: key 'nowhere' matches no task" in output
    assert f"Wrote train.jsonl, eval.jsonl and manifest.json to {out}" in output
    umask = os.umask(0)
    os.umask(umask)
    assert (out / "train.jsonl").stat().st_mode & 0o777 == 0o666 & ~umask
    assert out.stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_run_accepts_what_was_prepared(tmp_path: Path, tasks: Path) -> None:
    out = tmp_path / "data"
    assert flotilla("data", "prepare", tasks, "--out", out)[0] == 0
    sets = [{"name": "heldout", "tasks": str(out / "eval.jsonl")}]
    config = make_config(tmp_path, tasks=str(out / "train.jsonl"), eval={"sets": sets})
    trained = load_tasks(Path(config.tasks))
    held: EvalSet = load_eval_set(config.eval.sets[0], SelectConfig())
    refuse_trained_tasks(trained, [held])
    assert (len(trained), len(held.tasks)) == (74, 6)


def test_lists_may_be_repeated_or_have_commas(tmp_path: Path) -> None:
    rows = [make_row(f"{env}-{n}", env, difficulty=n) for env in "abc" for n in (1, 2, 3)]
    tasks = source(tmp_path, rows)
    for words in (
        ("--env", "a", "--env", "b", "--difficulty", "1", "--difficulty", "3"),
        ("--env", "a, b", "--difficulty", "1,3,"),
    ):
        assert flotilla("data", "prepare", tasks, "--out", tmp_path / "data", *words)[0] == 0
        trained = load_tasks(tmp_path / "data" / "train.jsonl")
        assert sorted(task.key for task in trained) == ["a-1", "a-3", "b-1", "b-3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--strict",), "--strict: 2 tasks have faults"),
        (("--env", "shp"), "no environment 'shp'; did you mean 'shop'"),
        (("--modality", "computer_use"), "is left, so nothing was written"),
        (("--max-env-share", "0.4"), "of 2 environments to train on, one has at least 1/2"),
        (("--max-env-share", "2"), "'2' is not a share from 0 to 1"),
        (("--eval-ratio", "nan"), "'nan' is not a share from 0 to 1"),
        (("--quarantine", "{t}/nowhere"), "--quarantine: {t}/nowhere: No such file"),
        (("--quarantine", "{t}/tasks.jsonl"), "tasks.jsonl: line 1: unknown key 'prompt'"),
        (("--out", "{t}"), "{t} holds something else (tasks.jsonl)"),
        (("--out", "{t}/tasks.jsonl"), "tasks.jsonl is not a folder"),
        (("--format", "csv"), "'csv' is not"),
        (("--allow", "relative-date"), "no lint 'relative-date'; did you mean 'relative_date'"),
        (("--keep-split", "{t}/nowhere"), "cannot read {t}/nowhere/manifest.json"),
        (("--keep-split", "{t}/tasks.jsonl"), "`flotilla data prepare` writes one"),
    ],
)
def test_a_wrong_wish_is_named_and_nothing_is_written(
    tmp_path: Path, tasks: Path, words: Sequence[str], message: str
) -> None:
    given = [word.format(t=tmp_path) for word in words]
    code, output = flotilla("data", "prepare", tasks, "--out", tmp_path / "data", *given)
    assert code == 2, output
    assert message.format(t=tmp_path) in output
    assert [path.name for path in tmp_path.iterdir()] == ["tasks.jsonl"]


def read_manifest(out: Path) -> dict[str, Any]:
    return json.loads((out / "manifest.json").read_text())


def test_a_split_is_kept_as_the_data_grow_and_the_manifest_says_which(
    tmp_path: Path, tasks: Path
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    assert flotilla("data", "prepare", tasks, "--out", old)[0] == 0
    grown = source(tmp_path, make_rows({"shop": 300, "desk": 80}), "grown.jsonl")
    assert flotilla("data", "prepare", grown, "--out", new, "--keep-split", old)[0] == 0
    code, output = flotilla("data", "diff", old, new)
    assert (code, "300 added, 0 removed, 0 changed, 0 moved, 80 unchanged" in output) == (0, True)
    sha256 = hashlib.sha256((old / "manifest.json").read_bytes()).hexdigest()
    assert read_manifest(new)["keep_split"] == {"path": str(old), "sha256": sha256}
    assert read_manifest(old)["keep_split"] is None


def test_a_lint_is_left_out_by_its_name(tmp_path: Path) -> None:
    reads = "def check(env):\n    return env.db('current')"
    rows = [make_row("late", prompt="Do it tomorrow."), make_row("seed", verifier_func=reads)]
    tasks, out = source(tmp_path, rows), tmp_path / "data"
    for words, kept in (
        (("--allow", "relative_date"), ["late"]),
        (("--allow", "relative_date,no_data_key", "--strict"), ["late", "seed"]),
    ):
        assert flotilla("data", "prepare", tasks, "--out", out, *words)[0] == 0
        assert sorted(task.key for task in load_tasks(out / "train.jsonl")) == kept
        manifest = read_manifest(out)
        assert manifest["filters"]["allow"] == sorted(words[1].split(","))


def test_a_version_of_fleets_tasks_is_prepared_from_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "v4/openenv"
    folder.mkdir(parents=True)
    path = source(folder, make_rows({"shop": 3}), "all_tool_use.json")
    version = ("--data-version", "v4", "--modality", "tool_use", "--out", tmp_path / "data")
    assert flotilla("data", "prepare", tmp_path, *version)[0] == 0
    assert read_manifest(tmp_path / "data")["source"]["url"] == str(path)
    code, output = flotilla("data", "prepare", *version)
    assert (code, "or set S3_DATASET_BUCKET" in output) == (2, True)


def test_a_download_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(data_prepare, "_PROGRESS_S", 0.0)
    tasks = source(tmp_path, [make_row("a", prompt="x" * 200_000) for _ in range(10)])
    monkeypatch.setattr(store_files, "_BLOCK", 1_000_000)
    url = f"file://{tasks}"
    code, output = flotilla("data", "prepare", url, "--out", tmp_path / "data")
    assert (code, f"{url}: 1 of 2 MB\n{url}: 2 of 2 MB\n" in output) == (0, True), output
    assert read_manifest(tmp_path / "data")["source"]["version"].startswith("modified ")


def test_rows_without_an_environment_get_the_one_that_is_named(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "Play."}]
    tasks, out = source(tmp_path, [{"prompt": messages, "level": 1}]), tmp_path / "data"
    code, output = flotilla("data", "prepare", tasks, "--out", out)
    assert (code, "invalid: TRL: it names no environment" in output) == (2, True)
    assert flotilla("data", "prepare", tasks, "--out", out, "--default-env", "game")[0] == 0
    assert read_manifest(out)["filters"]["default_env"] == "game"
    assert list(read_manifest(out)["environments"]) == ["game"]


def test_parquet_is_prepared_shown_compared_and_read_again(tmp_path: Path, tasks: Path) -> None:
    lines, columns = tmp_path / "lines", tmp_path / "columns"
    assert flotilla("data", "prepare", tasks, "--out", lines)[0] == 0
    words = ("--out", columns, "--format", "parquet")
    code, output = flotilla("data", "prepare", tasks, *words)
    assert (code, "Wrote train.parquet, eval.parquet and" in output) == (0, True)
    code, output = flotilla("data", "diff", lines, columns)
    assert "0 added, 0 removed, 0 changed, 0 moved, 80 unchanged" in output
    code, output = flotilla("data", "show", columns / "train.parquet", "shop-7")
    assert (code, "prompt: Do shop-7." in output) == (0, True)
    assert flotilla("data", "stats", columns)[1] == flotilla("data", "stats", lines)[1]
    again = tmp_path / "again"
    code, output = flotilla("data", "prepare", columns / "train.parquet", "--out", again)
    assert (code, sum(map(len, read_manifest(again)["tasks"].values()))) == (0, 74)


def test_one_key_with_two_tasks_is_named_by_both_lines(tmp_path: Path) -> None:
    tasks = source(tmp_path, [make_row("a"), make_row("b"), make_row("a", prompt="Other.")])
    code, output = flotilla("data", "prepare", tasks, "--out", tmp_path / "data")
    assert code == 2
    assert "line 1 and line 3 have the key 'a' and differ" in output


def test_a_file_and_a_folder_are_shown_whole_and_by_task(tmp_path: Path, tasks: Path) -> None:
    out = tmp_path / "data"
    flotilla("data", "prepare", tasks, "--out", out)
    code, output = flotilla("data", "show", out, "--count", "2")
    assert code == 0
    assert output.splitlines()[0].split() == ["key", "environment", "part", "prompt"]
    assert "78 more; --count 0 shows all" in output
    code, output = flotilla("data", "show", out, "shop-7")
    assert code == 0
    assert {"part: train", "key: shop-7", "prompt: Do shop-7.", "env_id: shop"} <= {
        *output.splitlines()
    }
    code, output = flotilla("data", "show", out, "late")
    assert (code, "none of its 80 tasks has the key 'late'" in output) == (2, True)
    code, output = flotilla("data", "show", tasks)
    assert (code, "line 82 (blank): needs a non-empty string 'prompt'" in output) == (2, True)


def test_statistics_are_by_part_and_environment(tmp_path: Path, tasks: Path) -> None:
    out = tmp_path / "data"
    flotilla("data", "prepare", tasks, "--out", out)
    code, output = flotilla("data", "stats", out)
    assert code == 0
    assert [line.split()[:4] for line in output.splitlines()[1:]] == [
        ["desk", "train", "20", "tool_use"],
        ["shop", "train", "54", "tool_use"],
        ["all", "train", "74", "tool_use"],
        ["shop", "eval", "6", "tool_use"],
    ]


def test_a_difference_has_what_came_went_changed_and_moved(tmp_path: Path) -> None:
    rows = make_rows({"shop": 60})
    old, new = tmp_path / "old", tmp_path / "new"
    flotilla("data", "prepare", source(tmp_path, rows), "--out", old)
    rows = [{**rows[0], "difficulty": 2}, *rows[2:], make_row("more")]
    words = ("--out", new, "--eval-max", "5")
    flotilla("data", "prepare", source(tmp_path, rows), *words)
    code, output = flotilla("data", "diff", old, new)
    assert code == 0
    assert {"+ more", "- shop-1", "~ shop-0"} <= {*output.splitlines()}
    assert "1 added, 1 removed, 1 changed, 1 moved (eval → train: 1)" in output
    code, output = flotilla("data", "diff", old, old / "train.jsonl")
    assert "0 added, 6 removed, 0 changed, 0 moved, 54 unchanged" in output


def test_a_hostile_task_reaches_no_terminal(tmp_path: Path) -> None:
    row = make_row("a", prompt="\x1b]0;title\x07 do it", metadata={"x": "\x1b[2J"})
    path = source(tmp_path, [row])
    for words in (("show", path), ("show", path, "a"), ("stats", path)):
        code, output = flotilla("data", *words)
        assert code == 0
        assert "\x1b" not in output


def test_every_key_of_the_table_of_a_spec_is_an_option() -> None:
    names = {name.replace("_", "-") for name in DataTable.model_fields} - {"source", "version"}
    (group,) = [g for g in typer.main.get_group(app).commands.values() if g.name == "data"]
    assert isinstance(group, TyperGroup)
    options = {word for each in group.commands["prepare"].params for word in each.opts}
    assert {f"--{name}" for name in names} | {"--data-version", "source"} <= options
    # A run reads JSON lines in a folder that the table names itself.
    assert options - {f"--{name}" for name in names} == {
        *("source", "--data-version", "--out", "--format"),
    }


def test_all_modalities_are_no_filter(tmp_path: Path, tasks: Path) -> None:
    code, output = flotilla("data", "prepare", tasks, "--out", tmp_path / "d", "--modality", "all")
    assert code == 0, output
    assert "other_modality" not in output


def test_a_source_is_not_replaced_by_what_is_made_of_it(tmp_path: Path, tasks: Path) -> None:
    out = tmp_path / "data"
    assert flotilla("data", "prepare", tasks, "--out", out)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    code, output = flotilla("data", "prepare", out / "train.jsonl", "--out", out, "--max-tasks", 1)
    assert (code, "whose files are replaced: choose another folder" in output) == (2, True)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("files", [None, 5, [1], {"train.jsonl": 5}, {"train.jsonl": {}}])
def test_a_manifest_edited_by_hand_is_named(tmp_path: Path, tasks: Path, files: Any) -> None:
    out = tmp_path / "data"
    assert flotilla("data", "prepare", tasks, "--out", out)[0] == 0
    text = json.dumps({"format": 1, "files": files} if files else {"format": 1})
    (out / "manifest.json").write_text(text)
    for words in (
        ("prepare", tasks, "--out", out),
        ("prepare", tasks, "--out", tmp_path / "next", "--keep-split", out),
        ("show", out),
        ("diff", out, out),
    ):
        code, output = flotilla("data", *words)
        assert (code, "manifest.json is no manifest of prepared data" in output) == (2, True)

"""The folder of an evaluation: begun, gone on with, damaged, and used by two."""

import json
import resource
import signal
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla_reading.evaluation.evaluated_attempts import EvaluationError
from flotilla_reading.evaluation.results_folder import (
    EvaluationSettings,
    RecordedAttempt,
    open_results,
    read_results,
)

SETTINGS = EvaluationSettings("m", "spec", {"a": "1", "b": "2"}, 2, None, 50)
PLACES = [("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def attempt(key: str, number: int, reward: float | None = 1.0, text: str = "") -> RecordedAttempt:
    said = [{"role": "assistant", "content": text}]
    return RecordedAttempt(key, "notes", number, reward, messages=said)


@pytest.fixture
def small_files() -> Generator[int]:
    """Files of this process have at most so many bytes, as on a full disk."""
    kept, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, kept[1]))
    yield 4096
    resource.setrlimit(resource.RLIMIT_FSIZE, kept)
    signal.signal(signal.SIGXFSZ, ignored)


def test_every_place_without_a_grade_is_open_and_first_attempts_come_first(tmp_path: Path) -> None:
    with open_results(tmp_path / "out", SETTINGS) as results:
        assert results.open_places(SETTINGS) == PLACES
        results.add(attempt("b", 1))
        results.add(attempt("a", 1, None))
    with open_results(tmp_path / "out", SETTINGS) as results:
        assert results.open_places(SETTINGS) == [PLACES[0], *PLACES[2:]]
    found = read_results(tmp_path / "out")[1]
    assert [(each.task_key, each.reward) for each in found] == [("b", 1.0), ("a", None)]


def test_an_evaluation_that_was_killed_before_it_was_described_begins_again(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").touch()
    (tmp_path / ".evaluation.json.4711").write_text("{")
    with open_results(tmp_path, SETTINGS) as results:
        results.add(attempt("a", 1))
    assert len(read_results(tmp_path)[1]) == 1


def test_settings_that_no_attempt_was_made_with_can_be_corrected(tmp_path: Path) -> None:
    corrected = replace(SETTINGS, spec="corrected")
    with open_results(tmp_path, SETTINGS):
        pass
    with open_results(tmp_path, corrected) as results:
        results.add(attempt("a", 1))
    with (
        pytest.raises(EvaluationError, match=r"the spec's \[env_gateway\] differs"),
        open_results(tmp_path, SETTINGS),
    ):
        pass
    assert read_results(tmp_path)[0] == corrected


@pytest.mark.parametrize("name", ["results.jsonl", "thesis.tex"])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with (
        pytest.raises(EvaluationError, match="holds something else"),
        open_results(tmp_path, SETTINGS),
    ):
        pass
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "mine")]


def test_a_second_one_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with (
        open_results(tmp_path, SETTINGS),
        pytest.raises(EvaluationError, match="another `flotilla eval` works in"),
        open_results(tmp_path, SETTINGS),
    ):
        pass


@pytest.mark.parametrize(("key", "number"), [("c", 1), ("a", 3), ("a", 0), ("a", -1)])
def test_a_result_of_another_evaluation_is_not_counted_with_these(
    tmp_path: Path, key: str, number: int
) -> None:
    with open_results(tmp_path, SETTINGS) as results:
        results.add(attempt("a", 1))
        results.add(attempt(key, number))
    with pytest.raises(EvaluationError, match=rf"line 2: attempt {number} at '{key}' is none of"):
        read_results(tmp_path)


def test_on_a_full_disk_whole_attempts_stay_and_the_cut_one_is_made_again(
    tmp_path: Path, small_files: int
) -> None:
    full = EvaluationError
    with pytest.raises(full, match="File too large"), open_results(tmp_path, SETTINGS) as results:
        for key, number in PLACES:
            results.add(attempt(key, number, text="x" * (small_files // 3)))
    assert (tmp_path / "results.jsonl").stat().st_size == small_files
    assert [each.task_key for each in read_results(tmp_path)[1]] == ["a", "b"]
    with open_results(tmp_path, SETTINGS) as results:
        assert results.open_places(SETTINGS) == PLACES[2:]
    many = EvaluationSettings("m", "spec", {f"{n}": "digest" for n in range(500)}, 2, None, 50)
    with pytest.raises(full, match="File too large"), open_results(tmp_path / "new", many):
        pass
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["results.jsonl"]
    with open_results(tmp_path / "new", SETTINGS) as results:
        assert results.open_places(SETTINGS) == PLACES


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"hello", "malformed"),
        (b"[1]", "Expected `object`"),
        (b"\xff", "line 1"),
        (json.dumps({"task_key": "a", "env_key": "e", "attempt": 1}).encode(), "reward"),
        (b'{"task_key":"a","env_key":"e","attempt":1,"reward":NaN}', "malformed"),
        (b'{"task_key":"a","env_key":"e","attempt":1,"reward":1e999}', "out of range"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes, why: str) -> None:
    with open_results(tmp_path, SETTINGS):
        pass
    (tmp_path / "results.jsonl").write_bytes(line + b"\n")
    with pytest.raises(EvaluationError, match=f"line 1: .*{why}|{why}"):
        read_results(tmp_path)

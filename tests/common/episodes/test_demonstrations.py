"""Files of demonstrations: what is read is what was written, and anything else is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from flotilla_common.episodes.demonstrations import (
    DemonstrationHead,
    DemonstrationsError,
    episode_name,
    read_demonstrations,
    write_demonstrations,
)
from tests.support.demonstrations import make_demonstrations, write_file


def refusal(path: Path) -> str:
    with pytest.raises(DemonstrationsError) as caught:
        read_demonstrations(path)
    return str(caught.value)


def change_arrays(path: Path, change: Callable[[dict[str, NDArray[Any]]], None]) -> None:
    with np.load(path) as arrays:
        found = dict(arrays)
    change(found)
    np.savez(path, allow_pickle=False, **found)


def test_what_is_read_is_what_was_written_token_by_token(tmp_path: Path) -> None:
    given = make_demonstrations(7)
    counts, pruned = {"accepted": 9, "pruned": 1}, (episode_name(given[0].key),)
    head = DemonstrationHead("booking-1", "ab" * 32, {"min_reward": 1.0}, counts, pruned)
    write_demonstrations(tmp_path / "new/file.npz", head, given)
    found = read_demonstrations(tmp_path / "new/file.npz")
    assert found.head == head
    assert pruned == ("g000000r0/0/0",)
    for was, now in zip(given, found.sequences, strict=True):
        assert (was.source, was.key, was.task_key, was.reward) == (
            *(now.source, now.key, now.task_key, now.reward),
        )
        np.testing.assert_array_equal(was.token_ids, now.token_ids)
        np.testing.assert_array_equal(was.trained, now.trained)
        assert (now.token_ids.dtype, now.trained.dtype) == (np.int32, np.bool_)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.npz"]


def test_the_same_episodes_give_the_same_file_and_others_another(tmp_path: Path) -> None:
    given = make_demonstrations(4)
    one, two = (write_file(tmp_path / name, given) for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    other = [*given[:3], replace(given[3], reward=0.5)]
    assert read_demonstrations(one).sha256 == read_demonstrations(two).sha256
    assert (
        read_demonstrations(one).sha256
        != read_demonstrations(write_file(tmp_path / "other", other)).sha256
    )


def test_what_is_no_such_file_is_refused_with_what_makes_one(tmp_path: Path) -> None:
    assert "flotilla sft SPEC --from RUN" in refusal(tmp_path / "missing.npz")
    (tmp_path / "text.npz").write_text("no archive")
    assert "is no file of demonstrations, or damaged" in refusal(tmp_path / "text.npz")
    whole = write_file(tmp_path / "whole.npz", make_demonstrations(3)).read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[:-200])
    assert "damaged" in refusal(tmp_path / "cut.npz")


def test_another_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    path = write_file(tmp_path / "file.npz", make_demonstrations(3))

    def change(arrays: dict[str, NDArray[Any]]) -> None:
        index = json.loads(arrays["index"].tobytes()) | {"format": 9}
        arrays["index"] = np.frombuffer(json.dumps(index).encode(), np.uint8)

    change_arrays(path, change)
    assert "has format 9, but flotilla" in refusal(path)


@pytest.mark.parametrize("name", ["token_ids", "trained", "rewards"])
def test_arrays_of_other_lengths_than_the_index_names_are_refused(
    tmp_path: Path, name: str
) -> None:
    path = write_file(tmp_path / "file.npz", make_demonstrations(3))
    change_arrays(path, lambda arrays: arrays.update({name: arrays[name][:-1]}))
    assert "3 sequences, and holds others" in refusal(path)


def test_a_first_token_that_is_trained_is_refused_because_nothing_predicts_it(
    tmp_path: Path,
) -> None:
    first = make_demonstrations(1)[0]
    spoiled = replace(first, trained=np.ones_like(first.trained))
    assert "nothing predicts it" in refusal(write_file(tmp_path / "file.npz", [spoiled]))

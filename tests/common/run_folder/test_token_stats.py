"""The file of a step's numbers, and the errors for a file that is none."""

import json
from pathlib import Path

import numpy as np
import pytest

from flotilla_common.domain.trajectory import Trajectory
from flotilla_common.process.own_version import own_version
from flotilla_common.run_folder.token_stats import TokenStatsError, encode_stats, read_token_stats
from flotilla_learner.dumps.step_stats import join_stats
from flotilla_learner.types import Standing, StepTokens
from tests.common.episodes.texts import (
    environment,
    policy,
    prompt,
    sequence_of,
    trajectory_of_texts,
)

TEXTS = ((prompt("ask"), policy("answer")), (prompt("ask"), environment("nothing")))


def attempt() -> Trajectory:
    return trajectory_of_texts(*(sequence_of(*parts) for parts in TEXTS))


def tokens(*counts: int) -> StepTokens:
    values = tuple(np.linspace(0, 1, count, dtype=np.float32) for count in counts)
    unknown = tuple(np.full(count, np.nan, np.float32) for count in counts)
    standings = (Standing.TRAINED, *[Standing.LEFT_OUT] * (len(counts) - 1))
    return StepTokens(standings, values, values, unknown, values)


def test_a_file_gives_back_what_ranks_handed_out(tmp_path: Path) -> None:
    stats = join_stats(7, 6, [attempt()], tokens(6, 0))
    path = tmp_path / "step_000007.npz"
    path.write_bytes(encode_stats(stats))
    found = read_token_stats(path)
    assert (found.step, found.base_version) == (7, 6)
    key = attempt().key
    first, second = found.sequences[key, 0], found.sequences[key, 1]
    np.testing.assert_array_equal(first.advantages, tokens(6).advantages[0])
    assert (first.trained, first.why_not) == (True, "")
    np.testing.assert_array_equal(first.weights, tokens(6).corrections[0])
    assert first.entropy.dtype == np.float16 and np.isnan(first.entropy).all()
    assert (second.trained, second.why_not) == (False, "no policy tokens")
    with np.load(path, allow_pickle=False) as arrays:
        assert {name: str(arrays[name].dtype) for name in arrays} == {
            "index": "uint8",
            "advantages": "float32",
            "logprobs": "float32",
            "entropy": "float16",
            "weights": "float32",
        }


def test_numbers_of_other_attempts_are_refused() -> None:
    with pytest.raises(TokenStatsError, match="plan of step 7 has 2 with 6"):
        join_stats(7, 6, [attempt()], tokens(5, 1))


@pytest.mark.parametrize("content", [None, b"", b"not a file", b"PK\x03\x04 torn"])
def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "step_000001.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TokenStatsError, match=r"step_000001\.npz (does not exist|is damaged)"):
        read_token_stats(path)


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "step_000007.npz"
    whole = encode_stats(join_stats(7, 6, [attempt()], tokens(6, 0)))
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        with pytest.raises(TokenStatsError, match="is damaged"):
            read_token_stats(path)


def test_a_file_names_the_flotilla_that_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "step_000007.npz"
    path.write_bytes(encode_stats(join_stats(7, 6, [attempt()], tokens(6, 0))))
    with np.load(path) as arrays:
        index = json.loads(arrays["index"].tobytes())
    assert index["written_by"] == own_version().to_dict()

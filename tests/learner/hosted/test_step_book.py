from pathlib import Path

import numpy as np
import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_learner.hosted.ports import HostedModel
from flotilla_learner.hosted.step_book import FinishedStep, KeptState, Pending, Published, StepBook
from flotilla_learner.types import Standing, StepResult, StepTokens

MODEL = HostedModel("s", "s:train:0")
OTHER = HostedModel("t", "t:train:0")


def result_of(loss: float) -> StepResult:
    values = (np.array([1.0, 2.0], np.float32),)
    tokens = StepTokens((Standing.TRAINED,), values, values, values, values)
    return StepResult({"policy/loss": loss}, 1.5, skipped=False, tokens=tokens)


def test_what_is_written_is_there_after_a_restart(tmp_path: Path) -> None:
    book = StepBook(tmp_path, "run")
    book.begin_model(MODEL, 0)
    pending = Pending("step", 2, 5, "digest")
    published = Published(0, "tinker://a", (0.5, -1.25))
    book.finish_step(FinishedStep(1, "data", result_of(0.25), 3, 100))
    book.write(pending=pending, published=(published,), states=(KeptState(1, "b", "m"),))
    again = StepBook(tmp_path, "run")
    assert again.page == book.page
    assert (again.page.version, again.page.next_order, again.page.trained_tokens) == (1, 3, 100)
    assert again.read_result(1, "other") is None
    found = again.read_result(1, "data")
    assert found is not None
    assert (found.metrics, found.seconds) == ({"policy/loss": 0.25}, 1.5)
    assert found.tokens is not None
    assert found.tokens.logprobs[0].tolist() == [1.0, 2.0]


def test_a_model_serves_from_where_all_results_since_are_known(tmp_path: Path) -> None:
    book = StepBook(tmp_path, "run")
    assert not book.serves_from(0)
    book.begin_model(MODEL, 2)
    for step in (3, 4, 5):
        book.finish_step(FinishedStep(step, "data", result_of(0.0), step, 1))
    assert [book.serves_from(version) for version in range(1, 7)] == [
        *(False, True, True, True, True, False)
    ]
    book.drop_results_before(3)
    assert [book.serves_from(version) for version in range(2, 6)] == [False, True, True, True]
    book.write(model=None)
    assert not book.serves_from(5)


def test_a_new_model_has_only_what_was_published_of_its_version(tmp_path: Path) -> None:
    book = StepBook(tmp_path, "run")
    book.begin_model(MODEL, 0)
    published = tuple(Published(version, f"tinker://{version}", ()) for version in (0, 1, 2))
    states = (KeptState(1, "tinker://state", MODEL.model_id),)
    book.write(version=2, published=published, states=states)
    assert book.find_state(1) == states[0]
    book.begin_model(OTHER, 1)
    assert book.find_published(1) == published[1]
    assert book.find_published(2) is None
    # Not of this model.
    assert book.find_state(1) is None
    assert len(book.page.published) == 3


def test_another_format_is_refused(tmp_path: Path) -> None:
    StepBook(tmp_path, "run").write(format=9)
    with pytest.raises(ConfigError, match="has format 9, but this program reads and writes 1"):
        StepBook(tmp_path, "run")


def test_a_broken_book_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hosted" / "book.json"
    StepBook(tmp_path, "run").write()
    path.write_text("{")
    with pytest.raises(ConfigError, match="move it away"):
        StepBook(tmp_path, "run")


def test_the_book_of_another_run_is_refused(tmp_path: Path) -> None:
    StepBook(tmp_path, "run").write()
    with pytest.raises(ConfigError, match=r"book\.json is of run run, not of other"):
        StepBook(tmp_path, "other")

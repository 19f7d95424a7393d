"""Errors of a learner that resumes a run with other tasks or from other weights."""

import json
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from flotilla_common.domain.policy import PolicyId
from flotilla_common.process.own_version import OwnVersion
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.learner import EvalSetConfig
from flotilla_learner.config.sampling import SelectConfig
from flotilla_learner.groups.policy_history import PolicyLineage
from flotilla_learner.journal.store import open_journal
from flotilla_learner.run import resume_checks
from flotilla_learner.run.resume_checks import (
    check_base_is_the_same,
    check_engine_is_the_same,
    check_eval_sets_are_the_same,
    check_publications_are_alike,
    check_tasks_are_the_same,
    check_weights_are_the_same,
    note_writer,
)
from flotilla_learner.sampling.eval_sets import load_eval_set
from flotilla_learner.sampling.tasks import load_tasks
from flotilla_learner.types import ModelInfo
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import make_config


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({}, False),
        ({"groups_per_step": 4}, True),
        ({"sampling": {"mixing": "proportional"}}, True),
        ({"sampling": {"difficulty": {"enabled": True}}}, True),
    ],
)
async def test_another_order_of_tasks_is_used_with_a_warning(
    tmp_path: Path, changes: dict[str, object], warns: bool
) -> None:
    journal = open_journal(tmp_path / "run")
    try:
        with capture_logs() as logs:
            for config in (make_config(tmp_path), make_config(tmp_path, **changes)):
                tasks = load_tasks(Path(config.tasks))
                await check_tasks_are_the_same(journal, tasks, config, 0)
    finally:
        await journal.close()
    assert ("task order changes from here on" in str(logs)) == warns


@pytest.mark.parametrize(
    ("began", "now", "words"),
    [
        ([0, 1, 2], [0, 1, 2], ()),
        ([0, 1, 2], [2, 1, 0], ("in another order", "gone=0", "new=0", "changed=0")),
        ([0, 1, 2], [0, 3], ("are not comparable", "gone=2", "new=1", "changed=0")),
        ([0, 1], [0, -1], ("are not comparable", "gone=0", "new=0", "changed=1")),
    ],
)
async def test_other_evaluation_tasks_or_another_order_of_them_is_noticed(
    tmp_path: Path,
    began: list[int],
    now: list[int],
    words: tuple[str, ...],
) -> None:
    path = tmp_path / "heldout.json"
    config = EvalSetConfig(name="heldout", tasks=str(path))
    journal = open_journal(tmp_path / "run")
    try:
        with capture_logs() as logs:
            for numbers in (began, now):
                tasks = [{"key": f"t{abs(n)}", "prompt": f"do {n}", "env_id": "e"} for n in numbers]
                path.write_text(json.dumps(tasks))
                await check_eval_sets_are_the_same(journal, [load_eval_set(config, SelectConfig())])
    finally:
        await journal.close()
    text = " ".join(f"{name}={value}" for entry in logs for name, value in entry.items())
    assert bool(text) == bool(words)
    assert all(word in text for word in words), text


@pytest.mark.parametrize(
    ("step", "known", "reference", "problem"),
    [
        (0, b"other", None, "no checkpoint yet"),
        (5, b"other", None, None),
        (5, b"other", b"reference", "its KL penalty or its adapters depend on them"),
        (5, b"reference", b"reference", None),
        (5, None, b"reference", None),
    ],
)
async def test_other_initial_weights_are_refused_where_they_matter(
    tmp_path: Path, step: int, known: bytes | None, reference: bytes | None, problem: str | None
) -> None:
    lineage = PolicyLineage([PolicyId(1, 0, known)] if known else [], {})
    info = ModelInfo(parameters=1, vocab_size=1, step=step, reference=reference)
    checked = check_weights_are_the_same(lineage, FakeRanks(tmp_path), info)
    if problem is None:
        await checked
    else:
        with pytest.raises(ConfigError, match=f"not those that this run started with, .*{problem}"):
            await checked


async def test_another_base_of_adapters_is_refused_in_a_run_that_published_nothing(
    tmp_path: Path,
) -> None:
    infos = [ModelInfo(1, 1, 5, reference=each) for each in (None, b"base", b"base", b"other")]
    journal = open_journal(tmp_path / "run")
    try:
        for info in infos[:3]:
            await check_base_is_the_same(journal, info)
        with pytest.raises(ConfigError, match=r"started with, .* its adapters depend on them"):
            await check_base_is_the_same(journal, infos[3])
    finally:
        await journal.close()


@pytest.mark.parametrize(
    ("began", "now", "remedy"),
    [(None, 8, "leave it out"), (8, None, "set it to 8"), (8, 16, "set it to 8")],
)
async def test_a_run_keeps_publishing_what_it_began_to(
    tmp_path: Path, began: int | None, now: int | None, remedy: str
) -> None:
    first, other = (
        PolicyConfig(model="m", max_model_len=64, adapter_rank=rank) for rank in (began, now)
    )
    journal = open_journal(tmp_path / "run")
    try:
        for _ in range(2):
            await check_publications_are_alike(journal, first)
        with pytest.raises(ConfigError, match=rf"policy\.adapter_rank: .*{remedy}"):
            await check_publications_are_alike(journal, other)
    finally:
        await journal.close()


async def test_a_run_stays_with_the_engine_that_it_began_with(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "run")
    try:
        for _ in range(2):
            await check_engine_is_the_same(journal, "tinker")
        with pytest.raises(ConfigError, match="but the run started with 'tinker': set it to that"):
            await check_engine_is_the_same(journal, "ranks")
    finally:
        await journal.close()


async def test_the_journal_names_the_flotillas_that_wrote_it_and_another_one_is_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = open_journal(tmp_path / "run")
    try:
        with capture_logs() as logs:
            for commit in ("a", "a", "b"):
                writer = OwnVersion("1", commit)
                monkeypatch.setattr(resume_checks, "own_version", lambda found=writer: found)
                await note_writer(journal)
        written = (await journal.read_meta())["written_by"]
    finally:
        await journal.close()
    assert written == [{"version": "1", "commit": "a"}, {"version": "1", "commit": "b"}]
    assert [log["event"] for log in logs] == ["the run goes on under another flotilla"]
